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
    """Returns the first config up to 16 rows, None beyond."""
    return CONFIGS[0] if bucket.M <= block_weights.MOST_ROWS else None


def candidates(bucket: BlockMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS if bucket.M <= block_weights.MOST_ROWS else ()


def why_not(args: BlockMatmulArgs) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    return no_float64(args.bias) or block_weights.why_not(args.x, args.q)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:1], candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: BlockMatmulArgs, config: Config) -> None:
    fmt = microscale.format_of(args.q, args.scales)
    assert fmt is not None, "checked"
    block_weights.multiply(
        outs[0], args.x, args.q, args.scales, args.tensor_scale, args.bias, _FORMS[fmt.name], config
    )
