"""Every Triton implementation, forward and backward, computes its contract's edge cases in Triton's CPU interpreter."""

import pytest
import torch
from torch.utils._pytree import tree_map

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts

pytestmark = pytest.mark.interp

CPU = torch.device("cpu")
CASES = [
    pytest.param(name, case, dtype, id=f"{name}-{case.name.split(':')[0]}-{str(dtype).removeprefix('torch.')}")
    for name, contract in contracts().items()
    for case in contract.edge_cases
    for dtype in contract.dtypes
]


def tensors(value):
    return tuple(t for t in (value if isinstance(value, tuple | list) else (value,)))


def run(function, sample, dtype, cotangents=None):
    """(outputs, gradients of every floating argument) of `function`, its floating arguments cast to `dtype` if given."""
    leaves = []

    def leaf(a):
        if not isinstance(a, torch.Tensor) or not a.is_floating_point():
            return a
        leaves.append(a.detach().to(dtype or a.dtype).clone().requires_grad_())
        return leaves[-1]

    args, kwargs = tree_map(leaf, (sample.args, dict(sample.kwargs)))
    outputs = tensors(function(*args, **kwargs))
    grads = ()
    if cotangents is not None:
        given = [c.to(out.dtype) for c, out in zip(cotangents, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    return [o.detach() for o in outputs], list(grads)


def check(what, ours, torchs, oracle, factor):
    """The error against float64 is at most `factor` times that of torch in the same dtype, and a few roundings."""
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    floor = 2 * torch.finfo(ours.dtype).eps * oracle.abs().max().item()
    error, allowed = ((t.double() - oracle).abs().max().item() for t in (ours, torchs))
    assert error <= factor * allowed + floor, f"{what}: error {error:.3g}, torch's own {allowed:.3g}"


@pytest.mark.parametrize(("name", "case", "dtype"), CASES)
def test_edge_case(name, case, dtype, seed):
    contract = contracts()[name]
    sample = contract.inputs(case.params, dtype, CPU, seed)
    outputs, _ = run(contract.reference, sample, None)
    if not outputs[0].numel():
        return
    generator = torch.Generator().manual_seed(seed + 1)
    cotangents = None
    if contract.gradient is not None:
        cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    oracle = run(contract.reference, sample, torch.float64, cotangents)
    torchs = run(contract.reference, sample, None, cotangents)
    ours = run(lambda *a, **k: contract.function(*a, **k, backend="triton"), sample, None, cotangents)
    for i, triple in enumerate(zip(ours[0], torchs[0], oracle[0], strict=True)):
        check(f"output {i}", *triple, contract.tolerance)
    for i, (mine, theirs, exact) in enumerate(zip(ours[1], torchs[1], oracle[1], strict=True)):
        assert (mine is None) == (theirs is None), f"gradient {i}: {mine} instead of {theirs}"
        if mine is not None:
            check(f"gradient {i}", mine, theirs, exact, contract.gradient_tolerance)
