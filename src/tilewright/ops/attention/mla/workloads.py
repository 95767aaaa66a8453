"""What the bench measures.  `params` of a row: B, H, S, D, D_pe, D_v.

DeepSeek-V3 has 128 heads of 128 + 64, which eight GPUs share: 16 on one.  Names: B x H x S, then what the mask is.
"""

import torch

from tilewright.dispatch import Workload

HEADS = {"D": 128, "D_pe": 64, "D_v": 128}


def _row(batch: int, heads: int, s: int) -> Workload:
    sizes = {"B": batch, "H": heads, "S": s, **HEADS}
    return Workload(f"{batch}x{heads}x{s}_causal", sizes, (torch.bfloat16,))


WORKLOADS = (
    _row(8, 16, 1024),
    _row(8, 16, 2048),
    _row(4, 16, 4096),
    _row(2, 16, 8192),
    _row(1, 16, 16384),
    _row(8, 128, 1024),
    _row(2, 128, 2048),
    _row(1, 128, 4096),
    _row(1, 128, 8192),
    _row(1, 128, 16384),
)
CPU_WORKLOADS = (Workload("1x4x256_causal", {"B": 1, "H": 4, "S": 256, "D": 32, "D_pe": 16, "D_v": 32}),)

COMPILED = frozenset({"4x16x4096_causal", "1x128x4096_causal"})
"""Rows on which FlexAttention competes: each compiles separate kernels."""
