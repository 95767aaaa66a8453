"""fused_moe for Hopper: rows in the order of experts, then the grouped products of `gemm`, the first with its gate.

Both products are `few_rows_grouped` while an expert has up to 32 rows, where reading the weights decides, then
`expert_rows`, whose tiles have all rows of an expert, and `dense` beyond some hundred rows.  w1 has all gates before
the ups: tensor maps of a higher rank load boxes in which gates and ups take turns.  So the accumulators of a gate and
of its up belong to one thread, and the 2 I columns are never written.

The rows of x are written in their order before: 2*T*k*H elements through memory, 150 us of 4096 tokens of 7168, k = 8,
while the products take 4 ms.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs, grouped_bucket, k_grouped_bucket
from tilewright.ops.gemm.kernels.sm90 import dense, few_rows_grouped
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile
from tilewright.ops.gemm.kernels.sm90.dense_kernel import Config as TileConfig
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS
from tilewright.ops.gemm.kernels.sm90.operands import why_not_arch
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.moe.fused.args import (
    FusedMoeArgs,
    FusedMoeBackwardArgs,
    FusedMoeBucket,
    expected_rows,
    fused_bucket,
)
from tilewright.ops.moe.fused_moe import BACKWARD, FORWARD
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.backward import backward
from tilewright.ops.moe.kernels.pipeline_fp8 import Steps
from tilewright.ops.moe.kernels.sm90 import expert_rows, few_tokens
from tilewright.ops.moe.kernels.triton.moe_align import MOST_EXPERTS
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN


class Config(NamedTuple):
    """rows: of an expert, for which the products are chosen.   few_rows: whether they are those for few.   room: rows
    that a tile of `expert_rows` has room for; 0 chooses `dense`.
    """

    rows: int
    few_rows: bool
    room: int = 0


MOST_RANDOM, LONG_K = 256, 4096  # rows of an expert, and a K, from which a choice of tiles differs
MN_MAJOR_B = (1, 2)  # the layouts nn and tn
MOST_ROWS = 1024  # of an expert, that a choice tells from more
FEW_ROWS = 32  # 1024 tokens, 64 rows an expert, of 7168 x 2048 take 2.84 ms with room 128 and 3.93 by few_rows_grouped
ROOMS = {64: 128, 128: 192, 256: 288, 512: 288}
"""Room for experts of so many rows on average: a few of them have more."""
CONFIGS = (
    *(Config(1 << power, True) for power in range(11) if 1 << power <= MAX_ROWS),
    *(Config(1 << power, False, room) for power in range(11) for room in dict.fromkeys((0, ROOMS.get(1 << power, 0)))),
)


def configure(bucket: FusedMoeBucket, dtype: torch.dtype) -> Config | None:
    """Chooses by the rows that an expert has on average."""
    if dtype not in (torch.bfloat16, torch.float16) or not bucket.aligned:
        return None
    rows = min(expected_rows(bucket), MOST_ROWS)
    return Config(rows, rows <= FEW_ROWS, ROOMS.get(rows, 0))


def candidates(bucket: FusedMoeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    chosen = configure(bucket, dtype)
    if chosen is None:
        return ()
    others = [chosen._replace(few_rows=not chosen.few_rows)] if chosen.rows <= MAX_ROWS else []
    return (chosen, *others, chosen._replace(few_rows=False, room=0)) if chosen.room else (chosen, *others)


def why_not(args: FusedMoeArgs) -> str | None:
    if args.activation != "silu":
        return f'has the gate "silu" alone, got {args.activation!r}'
    return why_not_backward(args)


def why_not_backward(args: FusedMoeArgs | FusedMoeBackwardArgs) -> str | None:
    x, w1 = args.x, args.w1
    reason = why_not_arch(x)
    if reason is not None:
        return reason
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {x.dtype}"
    if not fused_bucket(args).aligned:
        return "needs w1 contiguous, w2 contiguous along I, both at 16 bytes, and H and I in multiples of 8"
    if w1.shape[0] > MOST_EXPERTS or args.topk_ids.shape[1] > MOST_CHOSEN:
        return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"
    return None


def product(d: Tensor, args: GroupedArgs, config: Config, *, halves: bool = False) -> None:
    """d (1, R, N_out) = the grouped product, by the kernel for few rows a group or one of those for many."""
    if config.few_rows:
        few = few_rows_grouped.configure(grouped_bucket(args), args.a.dtype)
        if few is not None:
            few_rows_grouped.gemm_rows(d, args, few, halves=halves)
            return
    if config.room:
        expert_rows.gemm_rows(d, args, config.room, once=config.rows < config.room)
    else:
        dense.gemm_rows(d, args, tile(args), halves=halves)


def tile(args: GroupedArgs) -> TileConfig:
    """How many rows an expert has is random, and a tile of 128 rows of which half is outside takes half as long: so
    multiprocessors that share weights drift apart, and read them twice.  Of experts with up to 256 rows, products of
    long K take tiles of 64 rows, others narrower ones.  4096 tokens, 128 experts, 7168 x 2048, on an H100 in 2026-11:
    the first product took 3.73 ms with 64 x 256, 5.88 with 128 x 192 and 6.0 with 128 x 256; the second 2.23 with
    128 x 192, 2.38 with 128 x 256.
    """
    bucket = grouped_bucket(args)
    if bucket.rows > MOST_RANDOM or bucket.N < 512:
        chosen = dense.configure_rows(bucket, args.a.dtype)
        assert chosen is not None, "operands without scales"
        return chosen
    problem = Problem(
        bucket.rows, bucket.N, bucket.K, gated=bool(bucket.gated), mn_major_b=bucket.layout in MN_MAJOR_B, sms=132
    )
    shape = Tile(64, 256, 1, 1) if bucket.K >= LONG_K else Tile(128, 192, 1, 1)
    return dense.config_of(shape, problem)._replace(group_m=16)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: FusedMoeArgs, config: Config) -> None:
    x, w1, w2 = args.x, args.w1, args.w2
    steps: Steps = few_tokens if few_tokens.serves(args, outs[0]) else pipeline
    rows, gathered, _ = steps.order_and_rows(args, config.rows, cast=False)
    limits = rows.starts, rows.ends, rows.expected_rows
    hidden = scratch((1, gathered.shape[0], w2.shape[2]), x.dtype, x.device)
    first = GroupedArgs(gathered[None], w1.mT, None, None, *limits, "swiglu", x.dtype)
    product(hidden, first, config, halves=True)
    y = scratch((1, *gathered.shape), x.dtype, x.device)
    product(y, GroupedArgs(hidden, w2.mT, None, None, *limits, "", x.dtype), config)
    steps.combine(outs[0], y[0], args, rows)


class Products:
    """The grouped products of `gemm` for Hopper."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def rows(self, d: Tensor, args: GroupedArgs) -> None:
        """d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""
        product(d, args, self.config)

    def along_k(self, d: Tensor, args: KGroupedArgs) -> None:
        """d (G, M, N) = a (M, S) times b (S, N), of the rows of each group."""
        config = dense.configure_along_k(k_grouped_bucket(args), args.a.dtype)
        assert config is not None, "operands without scales"
        target = d if copyable(d) else scratch(d.shape, d.dtype, d.device)
        dense.gemm_along_k(target, args, config)
        if target is not d:
            d.copy_(target)


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not_backward
)
def launch_backward(outs: tuple[Tensor, ...], args: FusedMoeBackwardArgs, config: Config) -> None:
    backward(outs, args, Products(config), config.rows)
