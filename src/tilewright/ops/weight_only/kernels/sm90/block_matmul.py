"""block_matmul on Hopper: `block_weights.cuh` multiplies at most 16 rows."""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.quant import microscale
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only.block_matmul import FORWARD, BlockMatmulArgs, BlockMatmulBucket
from tilewright.ops.weight_only.kernels.sm90 import block_weights
from tilewright.ops.weight_only.kernels.sm90.block_weights import CONFIGS, Config

_FORMS = {"mxfp4": block_weights.MXFP4, "nvfp4": block_weights.NVFP4, "mxfp8": block_weights.MXFP8}


def configure(bucket: BlockMatmulBucket, dtype: torch.dtype) -> Config | None:
    """Returns many warps for at most 8 rows, whose sums they hold; None beyond 16 rows.

    H200, 2026-11, 4096x4096, cold L2: mxfp4 M=1 5.9 us with (1, 16, 1, 1), 6.9 with (1, 8, 1, 3); M=16 12.9 at worst
    and 9.6 with (2, 8, 2, 1).
    """
    if bucket.M > block_weights.MOST_ROWS:
        return None
    return CONFIGS[0] if bucket.M <= 8 else CONFIGS[1]


def candidates(bucket: BlockMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS if bucket.M <= block_weights.MOST_ROWS else ()


def why_not(args: BlockMatmulArgs) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    return no_float64(args.bias) or block_weights.why_not(args.x, args.q)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:2], candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: BlockMatmulArgs, config: Config) -> None:
    fmt = microscale.format_of(args.q, args.scales)
    assert fmt is not None, "checked"
    block_weights.multiply(outs[0], args.x, args.q, args.scales, args.tensor_scale, args.bias, _FORMS[fmt.name], config)
