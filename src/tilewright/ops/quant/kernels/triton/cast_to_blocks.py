"""cast_to_blocks in Triton: one read, one write; a block stays in the registers of its program.

Traffic: 2 bytes an element of bf16 read, 4.25 bits written of mxfp4: 8192 x 7168, 149 MB, cannot take less than 35 us
at 4.3 TB/s.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant import microscale
from tilewright.ops.quant.cast_to_blocks import FORWARD, CastToBlocksArgs, CastToBlocksBucket
from tilewright.ops.quant.kernels.triton.microscale import cast_kernel
from tilewright.ops.quant.kernels.triton.numbers import as_stored
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """elements: of x, of a program."""

    elements: int
    num_warps: int


CONFIGS = (Config(4096, 4), Config(2048, 4), Config(8192, 8))


def configure(bucket: CastToBlocksBucket, dtype: torch.dtype) -> Config:
    """Chooses 32 elements a thread."""
    return CONFIGS[0]


def candidates(bucket: CastToBlocksBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


# No FMA: every product is rounded, as in the reference
_cast = TritonKernel(cast_kernel, enable_fp_fusion=False)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS[:1],
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, Tensor], args: CastToBlocksArgs, config: Config) -> None:
    q, scales = outs
    fmt = microscale.FORMATS[args.format]
    blocks = scales.numel()
    rows = config.elements // fmt.block
    powers = fmt.scale_dtype == microscale.UINT8
    values = (as_stored(q), as_stored(scales), args.x, args.tensor_scale, blocks)
    _cast(
        (triton.cdiv(blocks, rows),), values, (fmt.emax, fmt.bits, powers, fmt.block, rows), num_warps=config.num_warps
    )
