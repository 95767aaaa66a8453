"""block_matmul for many rows: Triton makes the weight in bfloat16, where it is exact, and torch multiplies.

Traffic: beyond that of the product, 2 bytes an element of the weight written and read: 14336 x 4096, 235 MB, 55 us at
4.3 TB/s beside 350 us of a product of 4096 rows.  With a tensor's scale or a bias the product is in float32 first.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.ops.gemm.dense.args import matmul_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.quant.kernels.triton.dequantize_blocks import CONFIGS, Config, restore_into
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only.block_matmul import FORWARD, BlockMatmulArgs, BlockMatmulBucket


def configure(bucket: BlockMatmulBucket, dtype: torch.dtype) -> Config:
    """Returns that of the dequantisation."""
    return CONFIGS[0]


def candidates(bucket: BlockMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


def why_not(args: BlockMatmulArgs) -> str | None:
    """Why these arguments cannot run; None if they can."""
    return no_float64(args.bias)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:1], candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: BlockMatmulArgs, config: Config) -> None:
    w = scratch((args.q.shape[0], args.x.shape[1]), args.x.dtype, args.x.device)
    restore_into(w, args.q, args.scales, None, config)
    alpha = 1.0 if args.tensor_scale is None else args.tensor_scale
    product(matmul_args(args.x, w.T, args.bias, None, None, alpha, args.out_dtype), outs[0])
