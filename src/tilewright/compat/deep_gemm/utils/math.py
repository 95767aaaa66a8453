"""DeepGEMM's `utils.math`: sizes rounded up, and casts to float8."""

from tilewright.compat.deep_gemm.casts import (
    cast_back_from_fp8,
    ceil_to_ue8m0,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
    unpack_ue8m0_from_int,
)
from tilewright.compat.deep_gemm.fp4 import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4
from tilewright.compat.deep_gemm.sizes import align, ceil_div

__all__ = [
    "align",
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "ceil_div",
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transpose_packed_fp4",
    "unpack_ue8m0_from_int",
]
