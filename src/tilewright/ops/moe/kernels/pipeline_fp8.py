"""The steps of `fused_moe_fp8`, for the grouped products of any backend.

Rows of x are cast and gathered by one kernel, gated rows cast by another, which reads the 2 I columns of the first
product once more: 4*T*k*I bytes written and read, 130 us of 4096 tokens of 7168 x 2048, k = 8.
"""

from collections.abc import Callable

from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.activation.kernels.triton import silu_fp8
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, unscaled
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.triton.cast_rows import scale_memory
from tilewright.ops.rows import RowsBucket

Product = Callable[[Tensor, GroupedArgs], None]
"""product(d (1, S, N), args): d = rows of each group of a (1, S, K) times its b (G, K, N), with scales."""


def run(out: Tensor, args: FusedMoeFp8Args, expected_rows: int, product: Product) -> None:
    """out (T, H) = the experts' weighted sum."""
    x, device = args.x, args.x.device
    rows, q, q_scales = pipeline.order_and_cast_rows(unscaled(args), expected_rows)
    count, inner = rows.slots.shape[0], args.w2.shape[2]

    def multiply(q: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        d = scratch((count, w.shape[1]), x.dtype, device)
        limits = rows.starts, rows.ends, rows.expected_rows
        product(d[None], GroupedArgs(q[None], w.mT, scales[None], w_scales, *limits, "", x.dtype))
        return d

    both = multiply(q, q_scales, args.w1, args.w1_scale)
    hidden, scales = scratch((count, inner), FP8, device), scale_memory(count, inner, device)
    silu_fp8.packed(hidden, scales, both, False, silu_fp8.configure(RowsBucket(count, inner), x.dtype))
    pipeline.combine(out, multiply(hidden, scales, args.w2, args.w2_scale), unscaled(args), rows)
