"""fused_moe_bias in Triton: rows in the order of experts, two grouped products of `gemm`, gate and sum with biases.

The products take weights along either dimension, as `grouped_matmul` does.  6*T*k*H*I flops, and the weights of all
experts that have tokens once: gpt-oss-20b's 32 experts of 2880 x 2880 are 1.6 GB in bf16, 0.38 ms at 4.2 TB/s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs, grouped_bucket, k_grouped_bucket
from tilewright.ops.gemm.kernels.triton import grouped_rows, k_grouped
from tilewright.ops.moe.fused_bias.args import (
    FusedMoeBiasArgs,
    FusedMoeBiasBackwardArgs,
    FusedMoeBiasBucket,
    expected_rows,
)
from tilewright.ops.moe.fused_moe_bias import BACKWARD, FORWARD
from tilewright.ops.moe.kernels import bias_pipeline
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """rows: of an expert, for which the products are chosen."""

    rows: int


CONFIGS = (Config(16), Config(64), Config(256))


def configure(bucket: FusedMoeBiasBucket, dtype: torch.dtype) -> Config:
    """Chooses the least that holds the rows that an expert has on average.  Unmeasured."""
    expected = expected_rows(bucket)
    return next((config for config in CONFIGS if expected <= config.rows), CONFIGS[-1])


def candidates(bucket: FusedMoeBiasBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return (configure(bucket, dtype),)


def why_not(args: FusedMoeBiasArgs | FusedMoeBiasBackwardArgs) -> str | None:
    return bias_pipeline.why_not(args) or no_float64(args.x)


def product(d: Tensor, args: GroupedArgs) -> None:
    grouped_rows.gemm(d, args, grouped_rows.configure(grouped_bucket(args), args.a.dtype))


def along_k(d: Tensor, args: KGroupedArgs) -> None:
    k_grouped.gemm(d, args, k_grouped.configure(k_grouped_bucket(args), args.a.dtype))


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: FusedMoeBiasArgs, config: Config) -> None:
    bias_pipeline.run(outs[0], args, product, config.rows)


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch_backward(outs: tuple[Tensor, ...], args: FusedMoeBiasBackwardArgs, config: Config) -> None:
    bias_pipeline.run_backward(outs, args, product, along_k, config.rows)
