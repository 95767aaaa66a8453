"""The steps of `fused_moe_fp8`, for the grouped products of any backend.

Rows of x are cast and gathered by one kernel, gated rows cast by another, which reads the 2 I columns of the first
product once more: 4*T*k*I bytes written and read, 130 us of 4096 tokens of 7168 x 2048, k = 8.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.moe.fused.args import FusedMoeArgs
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, unscaled
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.pipeline import Order

Product = Callable[[Tensor, GroupedArgs], None]
"""product(d (1, S, N), args): d = rows of each group of a (1, S, K) times its b (G, K, N), with scales."""


class Steps(Protocol):
    """What stands around the products; `pipeline` says what each does."""

    def order_and_rows(
        self, args: FusedMoeArgs, expected_rows: int, *, cast: bool
    ) -> tuple[Order, Tensor, Tensor | None]: ...

    def gate_and_cast(self, both: Tensor) -> tuple[Tensor, Tensor]: ...

    def combine(self, out: Tensor, y: Tensor, args: FusedMoeArgs, rows: Order) -> None: ...


def run(out: Tensor, args: FusedMoeFp8Args, expected_rows: int, product: Product, steps: Steps = pipeline) -> None:
    """out (T, H) = the experts' weighted sum."""
    plain = unscaled(args)
    rows, q, q_scales = steps.order_and_rows(plain, expected_rows, cast=True)
    assert q_scales is not None, "of a cast"

    def multiply(q: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        d = scratch((q.shape[0], w.shape[1]), args.x.dtype, args.x.device)
        limits = rows.starts, rows.ends, rows.expected_rows
        product(d[None], GroupedArgs(q[None], w.mT, scales[None], w_scales, *limits, "", d.dtype))
        return d

    hidden = steps.gate_and_cast(multiply(q, q_scales, args.w1, args.w1_scale))
    steps.combine(out, multiply(*hidden, args.w2, args.w2_scale), plain, rows)
