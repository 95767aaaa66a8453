"""The stride of a dimension of one element decides nothing: results are those of plain strides.

Forward and backward, of every op but attention, whose own tests ask the same; on torch, on the CPU's kernels, in
Triton's interpreter.  tests/gpu runs the mode `single_elements` of `validate.check` on every backend.
"""

from functools import partial

import pytest
import torch
from tests.harness.refusals import refusal
from tests.harness.single_elements import STRIDES, Single, results, singles

from tilewright import ops
from tilewright.dispatch import contracts, implementations
from tilewright.jit.tensor_map import plain_strides

CASES = [*singles()]
EVERY = range(len(STRIDES))
HAVE_TRITON = {name for name, c in contracts().items() if c.forward.compose or "triton" in implementations(name, "fwd")}
SAMPLED = 6
"""One case of so many runs in the interpreter, which is slow; with --exhaustive all do."""
IN_TRITON = [
    pytest.param(case, i // SAMPLED % len(STRIDES), marks=[pytest.mark.exhaustive] if i % SAMPLED else [])
    for i, case in enumerate(case for case in CASES if case.contract.name in HAVE_TRITON)
]
ON_CPU = {name for name, c in contracts().items() if "cpu" in implementations(name, "fwd")}
CASES_OF_CPU = [c for c in CASES if c.contract.name in ON_CPU and not refusal(c.contract, c.params, "cpu")]


def name_of(value):
    if isinstance(value, Single):
        return "-".join([value.contract.name, *(f"{k}={v}" for k, v in value.params.items() if type(v) is int)])
    return value


def same(single, backend, firsts=EVERY, **tolerance):
    function = partial(single.contract.function, backend=backend)
    plain = results(single, function, None)
    for first in firsts:
        for ours, wanted in zip(results(single, function, first), plain, strict=True):
            torch.testing.assert_close(ours, wanted, equal_nan=True, **tolerance)


def test_every_op_has_cases():
    assert {case.contract.name for case in CASES} >= {"rms_norm", "softmax", "apply_rope", "matmul", "scaled_matmul"}
    assert len(CASES) > 200


@pytest.mark.parametrize(("single", "first"), [(c, i % len(STRIDES)) for i, c in enumerate(CASES)], ids=name_of)
def test_torch(single, first, exhaustive):
    same(
        single, "torch", EVERY if exhaustive else [first]
    )  # whose products go to another routine by the stride of a single column


@pytest.mark.parametrize("single", CASES_OF_CPU, ids=name_of)
def test_cpu_kernels(single):
    same(single, "cpu", rtol=0, atol=0)


@pytest.mark.interp
@pytest.mark.parametrize(("single", "first"), IN_TRITON, ids=name_of)
def test_triton(single, first, exhaustive):
    same(single, "triton", EVERY if exhaustive else [first], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu", pytest.param("triton", marks=pytest.mark.interp)])
@pytest.mark.parametrize("transposed", [True, False], ids=["by_token", "by_head"])
def test_one_head_of_a_fused_projection_does_not_say_how_k_lies(backend, transposed):
    b, s, h_kv, d, r = 1, 129, 3, 96, 48
    g = torch.Generator().manual_seed(0)
    fused = torch.randn(b, s, 1 + 2 * h_kv, d, generator=g).bfloat16()
    q, k = fused[:, :, :1].transpose(1, 2), fused[:, :, 1 : 1 + h_kv].transpose(1, 2)
    k = k if transposed else k.contiguous()
    cos, sin = (torch.randn(1, s, r // 2, generator=g).bfloat16().repeat(1, 1, 2) for _ in range(2))
    wanted = contracts()["apply_rope"].reference(q, k, cos, sin)
    for ours, reference in zip(ops.apply_rope(q, k, cos, sin, backend=backend), wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


def test_plain_strides():
    x = torch.zeros(4, 5, dtype=torch.bfloat16)
    assert plain_strides(x) == (5, 1)
    assert plain_strides(x[:1].as_strided((1, 5), (1 << 40, 1))) == (8, 1)
    assert plain_strides(x[:, :1].as_strided((4, 1), (5, 0))) == (5, 1)
    assert plain_strides(x.as_strided((1, 4, 5), (0, 5, 1))) == (8, 5, 1)
    assert plain_strides(x.as_strided((4, 1, 5), (5, 3, 1))) == (5, 8, 1)
    assert plain_strides(x.as_strided((1, 1), (7, 7))) == (8, 1)
