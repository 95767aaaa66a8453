"""Activation checkpointing: a checkpointed call gives the bits and the gradients of a plain one.

`checkpoint(..., use_reentrant=False)` computes the forward again when a backward asks for what it saved, and hands each
saved tensor out once.
"""

import pytest
import torch
from tests.ops.gemm.stand_in import stand_in
from torch.utils.checkpoint import checkpoint

from tilewright import ops
from tilewright.dispatch import Sample, contract, contracts, implementations
from tilewright.errors import BackendError
from tilewright.validate.oracle import differentiate, gradient_inputs

MARKS = {"interpreter": pytest.mark.interp, "cuda": pytest.mark.gpu}


def places():
    """(op, device, backend) of every op with a gradient, on each place that has a kernel for it, and in torch."""
    for name, subject in sorted(contracts().items()):
        if subject.gradient is None:
            continue
        raw = subject.forward
        known = {"torch", *implementations(raw.op, "fwd")}
        for device, backends in (("cpu", ("torch", "cpu")), ("interpreter", ("triton",)), ("cuda", sorted(known))):
            for backend in known.intersection(backends) - ({"cpu"} if device == "cuda" else set()):
                yield pytest.param(name, device, backend, marks=MARKS.get(device, ()), id=f"{name}-{device}-{backend}")


def compare(function, sample, positions):
    """Outputs and gradients at `positions` of a plain and of a checkpointed call, bit by bit."""

    def checkpointed(*args, **kwargs):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    with torch.no_grad():
        made = function(*sample.args, **sample.kwargs)
    outputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    dys = [torch.randn_like(o.float()).to(o.dtype) if o.is_floating_point() else None for o in outputs]
    plain, again = (differentiate(f, sample, positions, dys) for f in (function, checkpointed))
    assert all(map(torch.equal, plain[0], again[0]))
    assert any(grad is not None for grad in plain[1].values()), "nothing was differentiated"
    for i, grad in plain[1].items():
        other = again[1][i]
        assert (grad is None) == (other is None)
        assert grad is None or torch.equal(grad, other), f"gradient of argument {i}"


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize("options", [(), ("bias",), ("c",), ("bias", "activation"), ("bias", "c", "activation")])
def test_products_and_what_is_beside_them(options, rows, backend):
    """Gradients of bias and c are no part of the backward op, and are made of what was saved too."""
    beside = {"bias": torch.randn(24), "c": torch.randn(rows, 24)}
    names = [name for name in options if name in beside]
    activation = "gelu" if "activation" in options else None
    sample = Sample((torch.randn(rows, 16), torch.randn(16, 24), *(beside[name] for name in names)))

    def matmul(a, b, *more):
        return ops.matmul(a, b, **dict(zip(names, more, strict=True)), activation=activation, backend=backend)

    def bmm(a, b, *more):
        given = {name: t[None] if name == "c" else t for name, t in zip(names, more, strict=True)}
        return ops.bmm(a[None], b[None], **given, activation=activation, backend=backend)

    with stand_in("matmul", "bmm"):
        for function in (matmul, bmm):
            compare(function, sample, range(len(sample.args)))


@pytest.mark.parametrize(("name", "device", "backend"), sorted(places(), key=lambda param: param.id))
def test_every_op(name, device, backend):
    subject, refusals = contract(name), []
    cases = subject.edge_cases[: 1 if device == "interpreter" else 4]

    def function(*args, **kwargs):
        return subject.function(*args, **kwargs, backend=backend)

    for workload in cases:
        sample = subject.inputs(
            workload.params, subject.dtypes[0], torch.device(device.replace("interpreter", "cpu")), 0
        )
        try:
            compare(function, sample, gradient_inputs(subject, sample))
        except BackendError as error:
            refusals.append(str(error))
    if len(refusals) == len(cases):
        assert device == "cuda", refusals
        pytest.skip(refusals[0])
