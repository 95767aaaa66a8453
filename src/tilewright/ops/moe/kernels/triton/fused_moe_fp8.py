"""fused_moe_fp8 in Triton: the steps of `pipeline_fp8` with the grouped products of `gemm`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.gemm.grouped.args import GroupedArgs, grouped_bucket
from tilewright.ops.gemm.kernels.triton import grouped_rows
from tilewright.ops.moe.fused.args import mean_rows
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, FusedMoeFp8Bucket
from tilewright.ops.moe.fused_moe_fp8 import FORWARD
from tilewright.ops.moe.kernels import pipeline_fp8
from tilewright.ops.moe.kernels.triton.moe_align import MOST_EXPERTS
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN


class Config(NamedTuple):
    """rows: of an expert, for which the products are chosen."""

    rows: int


MOST_ROWS = 1024  # of an expert, that a choice tells from more
CONFIGS = tuple(Config(1 << power) for power in range(11))


def configure(bucket: FusedMoeFp8Bucket, dtype: torch.dtype) -> Config:
    """Chooses by the rows that an expert has on average.  Unmeasured."""
    return Config(min(mean_rows(bucket.T, bucket.K, bucket.E), MOST_ROWS))


def why_not(args: FusedMoeFp8Args) -> str | None:
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (args.w1, args.w2)):
        return "needs w1 and w2 contiguous along their last dimension"
    if args.w1.shape[0] > MOST_EXPERTS or args.topk_ids.shape[1] > MOST_CHOSEN:
        return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"
    return None


def product(d: Tensor, args: GroupedArgs) -> None:
    """d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""
    grouped_rows.gemm(d, args, grouped_rows.configure(grouped_bucket(args), args.a.dtype))


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, why_not=why_not)
def launch(outs: tuple[Tensor], args: FusedMoeFp8Args, config: Config) -> None:
    pipeline_fp8.run(outs[0], args, config.rows, product)
