"""The backward of `fused_moe`, of which nothing but its arguments was saved: the first product is computed again.

Rows of x and of dy are gathered in the order of `moe_align`.  Then, for the rows of each expert: product = x w1^T, its
gate's rows h and their gradients, dh = dy w2; dw2 = dy^T (weight h), dw1 = dproduct^T x, dx = dproduct w1, summed over
the experts of a token.  6 products of T*k*H*I multiply-adds and two more for `product`, where the forward has 3.
Memory at once: 3 T*k*H + 6 T*k*I elements, all of it free again when the call returns.
"""

from typing import Protocol

from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs, plain_grouped_args, plain_k_grouped_args
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBackwardArgs
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.triton import moe_permute
from tilewright.ops.moe.kernels.triton.gate_backward import gate_backward
from tilewright.ops.moe.moe_permute import MoePermuteBackwardArgs, order_bucket


class Products(Protocol):
    """The grouped products of a backend."""

    def rows(self, d: Tensor, args: GroupedArgs) -> None:
        """d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""

    def along_k(self, d: Tensor, args: KGroupedArgs) -> None:
        """d (G, M, N) = a (M, S) times b (S, N), of the rows of each group."""


def backward(outs: tuple[Tensor, ...], args: FusedMoeBackwardArgs, products: Products, expected_rows: int) -> None:
    """outs: dx, dw1, dw2, dtopk_weights; those that are not needed are empty."""
    dx, dw1, dw2, dweights = outs
    dy, x, w1, w2 = args.dy, args.x, args.w1, args.w2
    forward = FusedMoeArgs(x, w1, w2, args.topk_weights, args.topk_ids, args.expert_map, args.activation)
    rows = pipeline.order(forward, expected_rows)
    count, (_, width, inner) = rows.slots.shape[0], w2.shape

    def memory(*shape: int) -> Tensor:
        return scratch(shape, x.dtype, x.device)

    def multiply(d: Tensor, a: Tensor, b: Tensor) -> Tensor:
        plain = plain_grouped_args(a[None], b, rows.starts, rows.ends, rows.expected_rows, x.dtype)
        products.rows(d[None], plain)
        return d

    gathered = pipeline.gather(forward, rows)
    product = multiply(memory(count, 2 * inner), gathered, w1.mT)
    dgathered = pipeline.gather(forward._replace(x=dy), rows)
    dhidden = multiply(memory(count, inner), dgathered, w2)
    dproduct, weighted = memory(count, 2 * inner), memory(count, inner)
    if not dweights.numel():
        dweights = scratch(args.topk_weights.shape, args.topk_weights.dtype, x.device)
    weights = args.topk_weights.contiguous()
    gate_backward((dproduct, weighted, dweights), product, dhidden, weights, rows, args.activation)
    if dw2.numel():
        products.along_k(dw2, plain_k_grouped_args(dgathered.mT, weighted, rows.ends, x.dtype))
    if dw1.numel():
        products.along_k(dw1, plain_k_grouped_args(dproduct.mT, gathered, rows.ends, x.dtype))
    if dx.numel():
        summed = MoePermuteBackwardArgs(multiply(memory(count, width), dproduct, w1), rows.positions)
        config = moe_permute.configure(order_bucket(width, rows.positions), x.dtype)
        moe_permute.launch_backward((dx,), summed, config)
