"""weight_only_matmul of 4-bit integers and at most 16 rows, from global memory to registers: `block_weights.cuh`.

H200, 2026-11, 4096x4096, cold L2, beside the kernel with a ring in shared memory: M=1 5.1 us and 7.0, M=4 5.7 and 7.0,
M=8 6.4 and 7.2, M=16 8.6 and 8.1.  Other sizes were not measured: the tables
decide, and the other one is the default.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import block_weights
from tilewright.ops.weight_only.kernels.sm90.block_weights import CONFIGS, Config
from tilewright.ops.weight_only.weight_only_matmul import FORWARD, WeightOnlyMatmulArgs, WeightOnlyMatmulBucket


def configure(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> Config | None:
    """Returns the config that won at at most 8 or 16 rows; None for more, and for 8 bits."""
    if bucket.bits != 4 or bucket.M > block_weights.MOST_ROWS or dtype != torch.bfloat16:
        return None
    return CONFIGS[0] if bucket.M <= 8 else CONFIGS[1]


def candidates(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns all configs where `configure` has one."""
    return CONFIGS if configure(bucket, dtype) is not None else ()


def why_not(args: WeightOnlyMatmulArgs) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    if packing.bits_of(args.q) != 4:
        return "is for weights of 4 bits"
    if args.x.dtype != torch.bfloat16:
        return f"is for bfloat16, and x is {args.x.dtype}"
    if args.activation:
        return f"has no activation, and {args.activation!r} is wanted"
    if not packing.in_layout(args.scales):
        return "needs scales of consecutive rows side by side, as quantize_weight lays them"
    return no_float64(args.scales, args.bias) or block_weights.why_not(args.x, args.q)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:2], candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: WeightOnlyMatmulArgs, config: Config) -> None:
    block_weights.multiply(outs[0], args.x, args.q, args.scales, None, args.bias, block_weights.INT4, config)
