"""`fused_moe_fp8` in plain torch, from the raw arguments: no wait for the device."""

import torch
from torch import Tensor

from tilewright.ops.activation.gated import silu_mul
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.moe import moe_align, moe_unpermute
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import block_amax, quantise, scale_of, spread


def experts(args: FusedMoeFp8Args) -> Tensor:
    """Sort, cast and gather, a product, gate and cast, a product, weighted sum."""
    x, w1, w2, w1_scale, w2_scale, weights, ids, expert_map = args
    slots, positions, _, ends = moe_align.reference(ids, w1.shape[0], expert_map=expert_map)
    is_local = (torch.arange(slots.shape[0], device=x.device) < ends[-1])[:, None]

    def product(rows: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        """Rows, cast, of each group times its w^T; 0 outside of the groups."""
        row_scales = scale_of(block_amax(rows, TOKEN))
        q = quantise(rows, spread(row_scales, TOKEN, *rows.shape))
        operands = GroupedArgs(q[None], w.mT, row_scales[None], scales, None, ends, 1, "", x.dtype)
        return torch.where(is_local, rows_product(operands)[0], 0)

    both, inner = product(x[slots.to(torch.int64) // max(1, ids.shape[1])], w1, w1_scale), w2.shape[2]
    hidden = silu_mul(both[:, :inner], both[:, inner:])
    return moe_unpermute.combined(product(hidden, w2, w2_scale), weights, positions)
