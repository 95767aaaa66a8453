"""The steps of `fused_moe_bias`, whose two products every backend has for itself."""

from collections.abc import Callable

from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs, plain_grouped_args, plain_k_grouped_args
from tilewright.ops.gemm.operands import major_b
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs, FusedMoeBiasBackwardArgs, plain
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.triton import bias_backward, bias_steps, moe_permute
from tilewright.ops.moe.kernels.triton.moe_align import MOST_EXPERTS
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN
from tilewright.ops.moe.moe_permute import MoePermuteBackwardArgs, order_bucket

Product = Callable[[Tensor, GroupedArgs], None]
"""d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""
AlongK = Callable[[Tensor, KGroupedArgs], None]
"""d (G, M, N) = a (M, S) times b (S, N), of the rows of each group."""


def run(out: Tensor, args: FusedMoeBiasArgs, product: Product, expected_rows: int) -> None:
    """Order, gather, first product, gate, second product, combine: five to seven launches."""
    x, w1, w2 = args.x, args.w1, args.w2
    _, width, inner = w2.shape
    rows = pipeline.order(plain(args), expected_rows)
    gathered = pipeline.gather(plain(args), rows)
    count = gathered.shape[0]

    def multiply(a: Tensor, w: Tensor, columns: int) -> Tensor:
        d = scratch((count, columns), x.dtype, x.device)
        limits = rows.starts, rows.ends, rows.expected_rows
        product(d[None], plain_grouped_args(a[None], w.mT, *limits, x.dtype))
        return d

    both = multiply(gathered, w1, 2 * inner)
    hidden = scratch((count, inner), x.dtype, x.device)
    bias_steps.gate(hidden, both, args, rows)
    y = multiply(hidden, w2, width)
    if args.w2_bias is None:
        pipeline.combine(out, y, plain(args), rows)
    else:
        bias_steps.combine(out, y, args, rows)


def run_backward(
    outs: tuple[Tensor, ...], args: FusedMoeBiasBackwardArgs, product: Product, along_k: AlongK, expected_rows: int
) -> None:
    """outs: dx, dw1, dw2, dtopk_weights and the biases' gradients; those that are not needed are empty.

    The first product is computed again.  Memory at once: 3 T*k*H + 6 T*k*I elements, free again when the call returns.
    """
    dx, dw1, dw2, dweights, dw1_bias, dw2_bias = outs
    dy, x, w1, w2, forward = args.dy, args.x, args.w1, args.w2, args.forward
    _, width, inner = w2.shape
    rows = pipeline.order(plain(forward), expected_rows)
    count = rows.slots.shape[0]

    def multiply(a: Tensor, b: Tensor, columns: int) -> Tensor:
        d = scratch((count, columns), x.dtype, x.device)
        product(d[None], plain_grouped_args(a[None], b, rows.starts, rows.ends, rows.expected_rows, x.dtype))
        return d

    gathered = pipeline.gather(plain(forward), rows)
    both = multiply(gathered, w1.mT, 2 * inner)
    dgathered = pipeline.gather(plain(forward)._replace(x=dy), rows)
    dhidden = multiply(dgathered, w2, inner)
    dboth, weighted = (scratch((count, columns), x.dtype, x.device) for columns in (2 * inner, inner))
    bias_backward.gate_backward((dboth, weighted, dweights), both, dhidden, dgathered, forward, rows)
    if args.w1_bias is not None:
        bias_backward.sum_rows(dw1_bias, dboth, None, rows)
    if args.w2_bias is not None:
        bias_backward.sum_rows(dw2_bias, dgathered, args.topk_weights, rows)
    if dw2.numel():
        along_k(dw2, plain_k_grouped_args(dgathered.mT, weighted, rows.ends, x.dtype))
    if dw1.numel():
        along_k(dw1, plain_k_grouped_args(dboth.mT, gathered, rows.ends, x.dtype))
    if dx.numel():
        summed = MoePermuteBackwardArgs(multiply(dboth, w1, width), rows.positions)
        config = moe_permute.configure(order_bucket(width, rows.positions), x.dtype)
        moe_permute.launch_backward((dx,), summed, config)


def why_not(args: FusedMoeBiasArgs | FusedMoeBiasBackwardArgs) -> str | None:
    """What no backend's steps take."""
    if args.w1.shape[0] > MOST_EXPERTS or args.topk_ids.shape[1] > MOST_CHOSEN:
        return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"
    if any(major_b(w.mT) is None for w in (args.w1, args.w2)):
        return "needs w1 and w2 contiguous along one of their last two dimensions"
    return None
