"""Every Triton implementation, forward and backward, computes its contract's edge cases in Triton's CPU interpreter.

Errors are judged by the library's own rule, against the float64 oracle and torch in the same dtype.
"""

from functools import partial

import pytest
import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts, implementations
from tilewright.dispatch.effects import pure
from tilewright.validate.bits import other_bits
from tilewright.validate.oracle import differentiate, gradient_inputs, truth

pytestmark = pytest.mark.interp

CPU = torch.device("cpu")
WITHOUT_TRITON = {"fused_moe_fp8"}  # its form in Triton compiles for Hopper alone, which has one in CUDA C++
BOTH_HALVES = 2
"""Edge cases that run in a second type of 16 bits too: the same kernel, but for conversions.  All where an op promises
the reference's bits, and on a GPU.
"""


def _dtypes(contract, place):
    """Of the edge case at this place."""
    first, *others = contract.dtypes
    every = contract.promises.reference_bits or place < BOTH_HALVES
    return first, *(dtype for dtype in others if every or dtype.itemsize != first.itemsize)


CASES = [
    pytest.param(name, case, dtype, id=f"{name}-{case.name.split(':')[0]}-{str(dtype).removeprefix('torch.')}")
    for name, contract in contracts().items()
    if name not in WITHOUT_TRITON
    for place, case in enumerate(contract.edge_cases)
    for dtype in _dtypes(contract, place)
]


@pytest.mark.parametrize(("name", "case", "dtype"), CASES)
def test_edge_case(name, case, dtype, seed):
    contract = contracts()[name]
    sample = contract.inputs(case.params, dtype, CPU, seed)
    expected = truth(contract, sample, seed)
    function = partial(contract.function, backend="triton")
    positions = gradient_inputs(contract, sample)
    if positions:
        outputs, gradients = differentiate(function, sample, positions, expected.cotangents)
    else:
        outputs, gradients = pure(contract, function)(*sample.args, **sample.kwargs), {}
    judged = [standard.judge(ours) for standard, ours in zip(expected.outputs, outputs, strict=True)]
    judged += [standard.judge(gradients[i]) for i, standard in expected.gradients.items()]
    assert [fault for measure in judged for fault in measure.faults] == []
    if contract.promises.reference_bits:
        wanted = pure(contract, contract.reference)(*sample.args, **sample.kwargs)
        assert [int(other_bits(a, b).sum()) for a, b in zip(outputs, wanted, strict=True)] == [0] * len(wanted)


@pytest.mark.parametrize("name", contracts())
def test_forward_and_backward_have_a_triton_implementation(name):
    """backend="triton" is strict in the forward; a missing backward would be the reference, silently."""
    for op in contracts()[name].raw_ops:
        assert ("triton" in implementations(op.op, op.direction)) == (name not in WITHOUT_TRITON)
