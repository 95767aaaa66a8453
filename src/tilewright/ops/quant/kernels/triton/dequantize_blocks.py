"""dequantize_blocks in Triton: one read, one write.

Traffic: 4.25 bits an element of mxfp4 read, 2 bytes of bf16 written: 14336 x 4096, 149 MB, cannot take less than 35 us
at 4.3 TB/s.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant import microscale
from tilewright.ops.quant.dequantize_blocks import FORWARD, DequantizeBlocksArgs, DequantizeBlocksBucket
from tilewright.ops.quant.kernels.triton.microscale import restore_kernel
from tilewright.ops.quant.kernels.triton.numbers import as_stored


class Config(NamedTuple):
    """elements: of a program."""

    elements: int
    num_warps: int


CONFIGS = (Config(4096, 4), Config(2048, 4), Config(8192, 8))


def configure(bucket: DequantizeBlocksBucket, dtype: torch.dtype) -> Config:
    """Chooses 32 elements a thread, 16 bytes of e2m1."""
    return CONFIGS[0]


def candidates(bucket: DequantizeBlocksBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


# No FMA: both products are rounded, as in the reference
_restore = TritonKernel(restore_kernel, enable_fp_fusion=False)


def restore_into(y: Tensor, q: Tensor, scales: Tensor, tensor_scale: Tensor | None, config: Config) -> None:
    """Writes the numbers to y, contiguous."""
    fmt = microscale.format_of(q, scales)
    assert fmt is not None, "checked"
    blocks, rows = scales.numel(), config.elements // fmt.block
    constants = (fmt.bits, fmt.scale_dtype == microscale.UINT8, tensor_scale is not None, fmt.block, rows)
    values = (y, as_stored(q), as_stored(scales), tensor_scale, blocks)
    _restore((triton.cdiv(blocks, rows),), values, constants, num_warps=config.num_warps)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:1], candidates=candidates)
def launch(outs: tuple[Tensor], args: DequantizeBlocksArgs, config: Config) -> None:
    restore_into(outs[0], args.q, args.scales, args.tensor_scale, config)
