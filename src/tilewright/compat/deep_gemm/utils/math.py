"""DeepGEMM's `utils.math`: sizes rounded up, and casts to float8."""

from tilewright.compat.deep_gemm.casts import (
    ceil_to_ue8m0,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
)
from tilewright.compat.deep_gemm.sizes import align, ceil_div

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
]
