"""GroupNorm in Triton.  A program holds one group of a sample in registers, channels by positions.

The two strides of a tile (BLOCK_C, BLOCK_S) tell contiguous tensors from channels_last ones; a tile is long in the
direction that has stride 1.  Mean and variance are two passes over one read (`moments.py`).  The backward recomputes
them, so the forward saves nothing.

Backward:  with wdy = weight * dy, for each group of n elements,
               dx = rstd * (wdy - (1 / n) * sum(wdy) - x_hat * (1 / n) * dot(wdy, x_hat))
           and, summed over samples and positions, dweight = sum(dy * x_hat), dbias = sum(dy).
Persistent programs, each for one group of several samples, accumulate the sums of the channels in registers;
`affine_sums` adds their results in a fixed order.
Traffic: forward reads x and writes y, 4 bytes an element at bf16; backward reads dy and x and writes dx, 6 bytes.
Groups of more than MAX_TILE elements take the kernels of `long_groups.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.group_norm import (
    BACKWARD,
    FORWARD,
    GroupNormArgs,
    GroupNormBackwardArgs,
    GroupsBucket,
    channels_last,
    dense,
)
from tilewright.ops.norm.kernels.triton import long_groups
from tilewright.ops.norm.kernels.triton.affine import load_bias, load_weight
from tilewright.ops.norm.kernels.triton.column_sums import affine_sums
from tilewright.ops.norm.kernels.triton.group_tiles import Groups, centred_tile, groups_of, sum_of, tile_of
from tilewright.ops.rows import contiguous

MAX_TILE = 8192  # elements of a group that a program holds
CTAS_PER_SM = 4


class Config(NamedTuple):
    tile: int  # elements of a tile
    num_warps: int


def configure(bucket: GroupsBucket, dtype: torch.dtype) -> Config:
    """The whole group at 16 elements a thread, or tiles of 4096; at 32 where channels are neighbours, whose sums are
    exchanged among all threads.
    """
    elements = triton.next_power_of_2(bucket.C) * triton.next_power_of_2(bucket.S)
    if elements > MAX_TILE:
        return Config(4096, num_warps=4 if bucket.channels_last else 8)
    return Config(MAX_TILE, num_warps=max(1, min(16, elements // 512)))


CONFIGS = tuple(
    dict.fromkeys(
        configure(GroupsBucket(1, 1, 1 << k, channels_last), torch.bfloat16)
        for channels_last in (0, 1)
        for k in range(15)
    )
)


def candidates(bucket: GroupsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """8 to 64 elements a thread."""
    elements = triton.next_power_of_2(bucket.C) * triton.next_power_of_2(bucket.S)
    tiles = (MAX_TILE,) if elements <= MAX_TILE else (1024, 2048, 4096, 8192)
    return tuple(
        Config(tile, warps)
        for tile in tiles
        for warps in (1, 2, 4, 8, 16)
        if 8 <= min(tile, elements) // (32 * warps) <= 64
    )


@triton.jit
def _group_norm_kernel(
    y, x, weight, bias, G, C, S, stride_b, stride_c, stride_s, eps,  # y, x: (B, G * C, S)  weight, bias: (G * C,)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y = x_hat * weight + bias, x_hat = (x - mean) * rstd, rstd = 1 / sqrt(variance + eps)."""
    # Load the group
    group = tl.program_id(0)
    offsets, channels, mask_c, mask = tile_of(
        group // G, group % G, 0, 0, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S
    )
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    # Normalise, scale and shift
    _, centred, variance = centred_tile(x_fp32, mask, tl.div_rn(1.0, (C + 0.0) * S))
    w, b = load_weight(weight, channels, mask_c), load_bias(bias, channels, mask_c)
    y_fp32 = centred * tl.rsqrt(variance + eps) * w[:, None] + b[:, None]
    tl.store(y + offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _group_norm_backward_kernel(
    dx, dw_partial, db_partial, dy, x, weight, B, G, C, S, stride_b, stride_c, stride_s, eps,  # partial: (P, G * C)
    AFFINE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of dy * x_hat and of dy over the samples of this program."""
    g = tl.program_id(0)
    dw = tl.zeros((BLOCK_C,), tl.float32)
    db = tl.zeros((BLOCK_C,), tl.float32)
    inv_n = tl.div_rn(1.0, (C + 0.0) * S)
    for b in tl.range(tl.program_id(1), B, tl.num_programs(1)):
        # Load the group of a sample
        offsets, channels, mask_c, mask = tile_of(b, g, 0, 0, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S)
        x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        # Recompute mean and rstd
        _, centred, variance = centred_tile(x_fp32, mask, inv_n)
        rstd = tl.rsqrt(variance + eps)
        x_hat = centred * rstd
        # Compute and store dx
        wdy = dy_fp32 * load_weight(weight, channels, mask_c)[:, None]
        mean_wdy, mean_wdy_x_hat = sum_of(wdy) * inv_n, sum_of(wdy * x_hat) * inv_n
        dx_fp32 = (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd
        tl.store(dx + offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)
        # Accumulate dw and db
        if AFFINE:
            dw += tl.sum(dy_fp32 * x_hat, 1)
            db += tl.sum(dy_fp32, 1)
    # Store this program's partial dw and db
    if AFFINE:
        offs_c = tl.arange(0, BLOCK_C)
        partial_offsets = (tl.program_id(1).to(tl.int64) * G + g) * C + offs_c
        tl.store(dw_partial + partial_offsets, dw, mask=offs_c < C)
        tl.store(db_partial + partial_offsets, db, mask=offs_c < C)


_forward = TritonKernel(_group_norm_kernel)
_backward = TritonKernel(_group_norm_backward_kernel)


def _groups(x: Tensor, args: GroupNormArgs | GroupNormBackwardArgs, tile: int) -> Groups:
    return groups_of(x, args.num_groups, tile, channels_last(args.x))


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: GroupNormArgs, config: Config) -> None:
    (y,) = outs
    x, weight, bias = dense(args.x, args.x), contiguous(args.weight), contiguous(args.bias)
    groups = _groups(x, args, config.tile)
    if groups.tiles > 1:
        long_groups.launch(y, x, weight, bias, long_groups.tiles_of(groups, config.tile), args.eps, config.num_warps)
        return
    parameters = (y, x, weight, bias, *groups.sizes, args.eps)
    _forward((groups.B * groups.G,), parameters, groups.blocks, num_warps=config.num_warps)


@register_kernel(BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor], args: GroupNormBackwardArgs, config: Config) -> None:
    dx, dweight, dbias = outs
    x, dy, weight = dense(args.x, args.x), dense(args.dy, args.x), contiguous(args.weight)
    groups = _groups(x, args, config.tile)
    affine = args.need_dweight or args.need_dbias
    if groups.tiles > 1:
        tiles = long_groups.tiles_of(groups, config.tile)
        partials = long_groups.launch_backward(dx, dy, x, weight, tiles, args.eps, config.num_warps)
    else:
        programs = min(groups.B, triton.cdiv(CTAS_PER_SM * device_info(x.device).sm_count, groups.G))
        partials = scratch((2, programs if affine else 1, groups.G * groups.C), torch.float32, x.device)
        parameters = (dx, partials[0], partials[1], dy, x, weight, groups.B, *groups.sizes, args.eps)
        _backward((groups.G, programs), parameters, (affine, *groups.blocks), num_warps=config.num_warps)
    affine_sums(dweight, dbias, partials)
