"""fused_moe_bias for Hopper: rows in the order of experts, two grouped products of `gemm`, gate and sum with biases.

The products are those of `grouped_matmul`: `few_rows_grouped` while an expert has up to 64 rows, `dense` beyond.  Both
read weights along either dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.gemm.grouped.args import GroupedArgs, grouped_bucket
from tilewright.ops.gemm.kernels.sm90 import dense, few_rows_grouped
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS
from tilewright.ops.gemm.kernels.sm90.operands import why_not_arch
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs, FusedMoeBiasBucket, bias_bucket, expected_rows
from tilewright.ops.moe.fused_moe_bias import FORWARD
from tilewright.ops.moe.kernels import bias_pipeline


class Config(NamedTuple):
    """rows: of an expert, for which the products are chosen."""

    rows: int


MOST_ROWS = 1024
CONFIGS = tuple(Config(1 << power) for power in range(11))


def configure(bucket: FusedMoeBiasBucket, dtype: torch.dtype) -> Config | None:
    """Chooses by the rows that an expert has on average.  Unmeasured."""
    if dtype not in (torch.bfloat16, torch.float16) or not bucket.aligned:
        return None
    return Config(min(expected_rows(bucket), MOST_ROWS))


def candidates(bucket: FusedMoeBiasBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    chosen = configure(bucket, dtype)
    return () if chosen is None else (chosen,)


def why_not(args: FusedMoeBiasArgs) -> str | None:
    reason = why_not_arch(args.x)
    if reason is not None:
        return reason
    if args.x.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {args.x.dtype}"
    if not bias_bucket(args).aligned:
        return "needs w1 and w2 contiguous along one dimension, at 16 bytes, and H and I in multiples of 8"
    return bias_pipeline.why_not(args)


def product(d: Tensor, args: GroupedArgs) -> None:
    bucket = grouped_bucket(args)
    if bucket.rows <= MAX_ROWS:
        few = few_rows_grouped.configure(bucket, args.a.dtype)
        if few is not None:
            few_rows_grouped.gemm_rows(d, args, few)
            return
    chosen = dense.configure_rows(bucket, args.a.dtype)
    assert chosen is not None, "operands without scales"
    dense.gemm_rows(d, args, chosen)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: FusedMoeBiasArgs, config: Config) -> None:
    bias_pipeline.run(outs[0], args, product, config.rows)
