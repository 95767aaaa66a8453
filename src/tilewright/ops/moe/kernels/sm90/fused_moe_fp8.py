"""fused_moe_fp8 for Hopper: the steps of `pipeline_fp8` with the scaled grouped products of `gemm`.

`few_rows_grouped` while an expert has up to 32 rows, where reading the weights decides, `fp8` beyond: 4096 tokens, 128
experts, 7168 x 2048, k = 8 are 2.9 Tflop and 5.6 GB of weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.gemm.grouped.args import GroupedArgs, GroupedBucket, grouped_bucket
from tilewright.ops.gemm.kernels.sm90 import few_rows_grouped, fp8
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS, deepest
from tilewright.ops.gemm.kernels.sm90.fp8_cost_model import Problem, Tile
from tilewright.ops.gemm.kernels.sm90.fp8_kernel import Config as TileConfig
from tilewright.ops.gemm.kernels.sm90.operands import why_not_arch
from tilewright.ops.moe.fused.args import mean_rows
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, FusedMoeFp8Bucket, fp8_bucket, unscaled, why_not_scales
from tilewright.ops.moe.fused_moe_fp8 import FORWARD
from tilewright.ops.moe.kernels import pipeline, pipeline_fp8
from tilewright.ops.moe.kernels.sm90 import few_tokens
from tilewright.ops.moe.kernels.triton.moe_align import MOST_EXPERTS
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN


class Config(NamedTuple):
    """rows: of an expert, for which the products are chosen.   few_rows: whether they are those for few."""

    rows: int
    few_rows: bool


MANY_ROWS, LONG_K = 512, 4096  # rows of an expert up to which tiles are chosen here, and a K that tells them apart
SHORT_K = 1024  # of few rows
FEW_ROWS = 32  # 1024 tokens, 64 rows an expert, of 7168 x 2048 take 1.59 ms by fp8 and 2.02 by few_rows_grouped
MOST_ROWS = 1024  # of an expert, that a choice tells from more
CONFIGS = tuple(
    Config(1 << power, few) for power in range(11) for few in ((True, False) if 1 << power <= MAX_ROWS else (False,))
)


def configure(bucket: FusedMoeFp8Bucket, dtype: torch.dtype) -> Config | None:
    """Chooses by the rows that an expert has on average."""
    if not bucket.aligned:
        return None
    rows = min(mean_rows(bucket.T, bucket.K, bucket.E), MOST_ROWS)
    return Config(rows, rows <= FEW_ROWS)


def candidates(bucket: FusedMoeFp8Bucket, dtype: torch.dtype) -> tuple[Config, ...]:
    chosen = configure(bucket, dtype)
    if chosen is None:
        return ()
    return (chosen, chosen._replace(few_rows=not chosen.few_rows)) if chosen.rows <= MAX_ROWS else (chosen,)


def why_not(args: FusedMoeFp8Args) -> str | None:
    reason = why_not_arch(args.x)
    if reason is not None:
        return reason
    reason = why_not_scales(args)
    if reason is not None:
        return reason
    if not fp8_bucket(args).aligned:
        return "needs w1 and w2 contiguous along their last dimension at 16 bytes, and H and I in multiples of 16"
    if args.w1.shape[0] > MOST_EXPERTS or args.topk_ids.shape[1] > MOST_CHOSEN:
        return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"
    return None


def product(d: Tensor, args: GroupedArgs, few_rows: bool) -> None:
    """d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""
    bucket = grouped_bucket(args)
    if few_rows:
        few = few_rows_grouped.configure(bucket, args.a.dtype)
        if few is not None:
            # Where a tile is a few steps, blocks hide each other's beginnings and ends
            short = deepest(few.tokens, 1, 3, bucket.scaling, grouped=True) if bucket.K <= SHORT_K else None
            few_rows_grouped.gemm_rows(d, args, short or few)
            return
    fp8.gemm_rows(d, args, tile(bucket))


def tile(bucket: GroupedBucket) -> TileConfig:
    """The rows of an expert are random, and a tile of 64 rows more costs less than one of 256.  4096 tokens, 128
    experts, 7168 x 2048, on an H200 in 2026-11: the first product took 2.31 ms with 128 x 192, 2.52 with 192 x 128 and
    with 256 x 128, the second 1.27, 1.21 and 1.41; 8192 tokens, 2048 x 768: 0.47, 0.44, 0.47, and 0.31, 0.29, 0.32.
    """
    if bucket.rows <= MANY_ROWS and bucket.N >= 128:
        shape = Tile(128, 192) if bucket.K >= LONG_K and bucket.N >= 192 else Tile(192, 128)
        problem = Problem(bucket.rows, bucket.N, bucket.K, scaling=bucket.scaling, batch=max(1, bucket.G))
        return fp8.config_of(shape, problem)
    config = fp8.configure_rows(bucket, torch.float8_e4m3fn)
    assert config is not None, "operands have scales"
    return config


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: FusedMoeFp8Args, config: Config) -> None:
    steps: pipeline_fp8.Steps = few_tokens if few_tokens.serves(unscaled(args), outs[0]) else pipeline
    pipeline_fp8.run(outs[0], args, config.rows, lambda d, grouped: product(d, grouped, config.few_rows), steps)
