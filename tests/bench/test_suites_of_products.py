"""The suites of 8 bits and of groups: which rows they select, and that every one of them can be made."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.bench.cases import select
from tilewright.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP8, HALF = torch.float8_e4m3fn, torch.bfloat16
OPS = {
    "quant": {
        "cast_to_blocks",
        "dequantize",
        "dequantize_blocks",
        "hadamard_transform",
        "per_block_cast_to_fp8",
        "per_channel_cast_to_fp8",
        "per_tensor_cast_to_fp8",
        "per_token_cast_to_fp8",
        "per_token_cast_to_int8",
    },
    "gemm_fp8": {"scaled_matmul", "scaled_matmul_fp8"},
    "gemm_int8": {"int8_matmul"},
    "grouped": {"group_gemm", "grouped_matmul", "groups_of_rows", "k_grouped_matmul", "masked_matmul"},
    "weight_only": {"block_matmul", "dequantize_weight", "quantize_weight", "weight_only_matmul"},
}


@pytest.mark.parametrize("suite", OPS)
def test_a_suite_is_a_family(suite: str) -> None:
    assert {item.contract.name for item in select(suite, device=GPU)} == OPS[suite]


@pytest.mark.parametrize("suite", OPS)
def test_every_declared_row_can_be_made(suite: str) -> None:
    with FakeTensorMode():
        for item in select(suite, device=GPU):
            item.contract.inputs(item.workload.params, item.dtype, CPU, 0)


def test_rows_of_eight_bits_are_held_against_the_rate_of_eight_bits() -> None:
    """The dtype of a case chooses the matrix rate that its floor is made of."""
    assert {item.dtype for item in select("gemm_fp8", device=GPU)} == {FP8}
    assert {item.dtype for item in select("gemm_int8", device=GPU)} == {torch.int8}
    for op in ("grouped_matmul", "masked_matmul", "k_grouped_matmul"):
        rows = select("grouped", ops=[op], device=GPU)
        assert {item.dtype for item in rows} == {FP8, HALF}
        assert {item.dtype for item in rows if item.workload.name.startswith("fp8")} == {FP8}


def test_a_dtype_is_named_as_the_op_names_it() -> None:
    assert {item.dtype for item in select("gemm_fp8", ops=["scaled_matmul_fp8"], dtype="fp8", device=GPU)} == {FP8}
    assert {item.dtype for item in select("weight_only", ops=["dequantize_weight"], dtype="uint8", device=GPU)} == {
        torch.uint8
    }
    with pytest.raises(UsageError, match="takes no dtype 'fp16'. Allowed: int8, uint8"):
        select("weight_only", ops=["dequantize_weight"], dtype="fp16", device=GPU)
