"""Divisions of the norms' kernels: none is approximate, and none divides by zero where a program has spare rows.

The interpreter divides exactly, a GPU does not unless it is told to: so the text of the compiled kernels is read.
"""

import pytest
import torch
from tests.harness.cases import declared_calls

from tilewright import ops
from tilewright.dispatch import contract, implementations

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
NORMS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8", "layer_norm")
KERNELS = [(name, op.direction) for name in (*NORMS, "softmax") for op in contract(name).raw_ops]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "direction"), KERNELS)
def test_no_approximate_division(name, direction):
    """Triton writes `/` of float32 as div.full, which is off by 2 ULP."""
    from tests.harness.fake_driver import target

    subject = contract(name)
    (op,) = [op for op in subject.raw_ops if op.direction == direction]
    implementation = implementations(op.op, op.direction)["triton"]
    telling = ("odd_n", "long_row", subject.workloads[0].name)
    texts = []
    for dtype in (subject.dtypes[0], subject.dtypes[-1]):
        for call in declared_calls(subject, op, dtype):
            if call.purpose.partition(":")[0] not in telling:
                continue
            config = implementation.configure(op.bucket_of(call.args, "default"), dtype)
            with target("sm_90") as compiled:
                implementation.launch(call.outputs(), *call.args, config=config)
            texts += [kernel.asm["ptx"] for kernel in compiled]
    assert len(texts) >= 4
    assert any("div.rn.f32" in text for text in texts) or (name, direction) == ("softmax", "bwd")
    assert not [line for text in texts for line in text.splitlines() if "div.full" in line or "div.approx" in line]


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
@pytest.mark.parametrize("device", DEVICES)
def test_without_eps_rows_that_are_none_leave_no_mark(device, name):
    """A program takes several rows; spare rows are zeros, and 1 / 0 would reach the gradient of the weight."""
    n = 96
    for m in (1, 5, 7):
        x, weight = torch.randn(m, n, device=device), torch.randn(n, device=device)
        given = (x, torch.zeros_like(x), weight) if name == "add_rms_norm" else (x, weight)
        found = {}
        for backend in ("triton", "torch"):
            leaves = [t.clone().requires_grad_() for t in given]
            made = getattr(ops, name)(*leaves, eps=0.0, backend=backend)
            y = made if isinstance(made, torch.Tensor) else made[0]
            found[backend] = (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))
        for ours, theirs in zip(*found.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
