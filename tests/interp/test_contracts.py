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


def _cases():
    """Every edge case: the first in all dtypes, each other one in the dtype that is next; with --exhaustive in all."""
    for name, contract in contracts().items():
        if name in WITHOUT_TRITON:
            continue
        for place, case in enumerate(contract.edge_cases):
            for turn, dtype in enumerate(contract.dtypes):
                others = place > 0 and turn != place % len(contract.dtypes)
                case_id = f"{name}-{case.name.split(':')[0]}-{str(dtype).removeprefix('torch.')}"
                marks = [pytest.mark.exhaustive] if others else []
                yield pytest.param(name, case, dtype, id=case_id, marks=marks)


@pytest.mark.parametrize(("name", "case", "dtype"), [*_cases()])
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
