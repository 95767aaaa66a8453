"""GroupNorm in Triton, groups too long for the registers of a program.  A group is divided into tiles, one a program.

Forward:   mean and variance of each tile; of each group, from those of its tiles (Chan, Golub, LeVeque, 1983); y.
Backward:  the same moments; the sums of dy * x_hat and of dy in each tile by channel; sum(wdy) and dot(wdy, x_hat) of
           each group from those; dx.  The sums of tiles are also the partial sums of dweight and dbias.
Traffic: the forward reads x twice, the backward x three times and dy twice; small tensors are read again from L2.
Which tiles there are depends on the sizes of a group alone, so a sample has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.affine import load_bias, load_weight
from tilewright.ops.norm.kernels.triton.group_tiles import Groups, centred_tile, count_of, tile_of
from tilewright.ops.norm.kernels.triton.moments import variance_of


@triton.jit
def _program_tile(C, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Group (among those of all samples), tile_c and tile_s of this program."""
    tiles_s = tl.cdiv(S, BLOCK_S)
    tiles = tl.cdiv(C, BLOCK_C) * tiles_s
    tile = tl.program_id(0) % tiles
    return tl.program_id(0) // tiles, tile // tiles_s, tile % tiles_s


@triton.jit
def _tile_moments_kernel(
    means, variances, x, G, C, S, stride_b, stride_c, stride_s,  # means, variances: (B * G, tiles)   x: (B, G * C, S)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    group, tile_c, tile_s = _program_tile(C, S, BLOCK_C, BLOCK_S)
    offsets, _, _, mask = tile_of(
        group // G, group % G, tile_c, tile_s, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S
    )
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    inv_n = tl.div_rn(1.0, count_of(tile_c, tile_s, C, S, BLOCK_C, BLOCK_S))
    mean, _, variance = centred_tile(x_fp32, mask, inv_n)
    tl.store(means + tl.program_id(0), mean)
    tl.store(variances + tl.program_id(0), variance)


@triton.jit
def _group_moments_kernel(
    mean, rstd, means, variances, C, S, eps,  # mean, rstd: (B * G,)   means, variances: (B * G, tiles)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """With n_t elements in tile t:   mean = sum(n_t * mean_t) / n,
    variance = sum(n_t * (variance_t + (mean_t - mean)^2)) / n.
    """
    tiles_s = tl.cdiv(S, BLOCK_S)
    tiles = tl.cdiv(C, BLOCK_C) * tiles_s
    first = tl.program_id(0).to(tl.int64) * tiles
    inv_n = tl.div_rn(1.0, (C + 0.0) * S)
    # First pass: the mean
    sums = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        count = tl.where(tile < tiles, count_of(tile // tiles_s, tile % tiles_s, C, S, BLOCK_C, BLOCK_S), 0.0)
        sums += count * tl.load(means + first + tile, mask=tile < tiles, other=0.0)
    group_mean = tl.sum(sums, 0) * inv_n
    # Second pass: deviations from the mean, and squares
    deviations = tl.zeros((BLOCK_T,), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        count = tl.where(tile < tiles, count_of(tile // tiles_s, tile % tiles_s, C, S, BLOCK_C, BLOCK_S), 0.0)
        deviation = tl.load(means + first + tile, mask=tile < tiles, other=0.0) - group_mean
        deviations += count * deviation
        squares += count * (tl.load(variances + first + tile, mask=tile < tiles, other=0.0) + deviation * deviation)
    shift, variance = variance_of(tl.sum(deviations, 0), tl.sum(squares, 0), inv_n)
    tl.store(mean + tl.program_id(0), group_mean + shift)
    tl.store(rstd + tl.program_id(0), tl.rsqrt(variance + eps))


@triton.jit
def _normalise_kernel(
    y, x, mean, rstd, weight, bias, G, C, S, stride_b, stride_c, stride_s,  # weight, bias: (G * C,)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * weight + bias."""
    group, tile_c, tile_s = _program_tile(C, S, BLOCK_C, BLOCK_S)
    offsets, channels, mask_c, mask = tile_of(
        group // G, group % G, tile_c, tile_s, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S
    )
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    w, b = load_weight(weight, channels, mask_c), load_bias(bias, channels, mask_c)
    y_fp32 = (x_fp32 - tl.load(mean + group)) * tl.load(rstd + group) * w[:, None] + b[:, None]
    tl.store(y + offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _tile_sums_kernel(
    dw_partial, db_partial, dy, x, mean, rstd, G, C, S, stride_b, stride_c, stride_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip  # partial: (B * tiles_s, G * C)
    """The sums of dy * x_hat and of dy over the positions of a tile."""
    group, tile_c, tile_s = _program_tile(C, S, BLOCK_C, BLOCK_S)
    b = group // G
    offsets, channels, mask_c, mask = tile_of(
        b, group % G, tile_c, tile_s, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S
    )
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    dy_fp32 = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    x_hat = (x_fp32 - tl.load(mean + group)) * tl.load(rstd + group)
    partial_offsets = (b.to(tl.int64) * tl.cdiv(S, BLOCK_S) + tile_s) * G * C + channels
    tl.store(dw_partial + partial_offsets, tl.sum(dy_fp32 * x_hat, 1), mask=mask_c)
    tl.store(db_partial + partial_offsets, tl.sum(dy_fp32, 1), mask=mask_c)


@triton.jit
def _group_sums_kernel(
    mean_wdy, mean_wdy_x_hat, dw_partial, db_partial, weight, G, C, S, TILES_S,  # partial: (B * TILES_S, G * C)
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(1 / n) * sum(wdy) and (1 / n) * dot(wdy, x_hat) of each group, from the sums of its tiles by channel."""
    group = tl.program_id(0)
    acc_wdy = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    acc_wdy_x_hat = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start_c in range(0, C, BLOCK_C):
        offs_c = start_c + tl.arange(0, BLOCK_C)
        channels = (group % G * C + offs_c).to(tl.int64)
        w = load_weight(weight, channels, offs_c < C)
        for start_t in range(0, TILES_S, BLOCK_T):
            tile_s = start_t + tl.arange(0, BLOCK_T)
            mask = (tile_s < TILES_S)[:, None] & (offs_c < C)[None, :]
            row = (group // G).to(tl.int64) * TILES_S + tile_s
            offsets = row[:, None] * G * C + channels[None, :]
            acc_wdy += w[None, :] * tl.load(db_partial + offsets, mask=mask, other=0.0)
            acc_wdy_x_hat += w[None, :] * tl.load(dw_partial + offsets, mask=mask, other=0.0)
    inv_n = tl.div_rn(1.0, (C + 0.0) * S)
    tl.store(mean_wdy + group, tl.sum(tl.sum(acc_wdy, 1), 0) * inv_n)
    tl.store(mean_wdy_x_hat + group, tl.sum(tl.sum(acc_wdy_x_hat, 1), 0) * inv_n)


@triton.jit
def _dx_kernel(
    dx, dy, x, mean, rstd, mean_wdy, mean_wdy_x_hat, weight, G, C, S, stride_b, stride_c, stride_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (wdy - (1 / n) * sum(wdy) - x_hat * (1 / n) * dot(wdy, x_hat)), wdy = weight * dy."""
    group, tile_c, tile_s = _program_tile(C, S, BLOCK_C, BLOCK_S)
    offsets, channels, mask_c, mask = tile_of(
        group // G, group % G, tile_c, tile_s, C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S
    )
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    wdy = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32) * load_weight(weight, channels, mask_c)[:, None]
    rstd_group = tl.load(rstd + group)
    x_hat = (x_fp32 - tl.load(mean + group)) * rstd_group
    dx_fp32 = (wdy - tl.load(mean_wdy + group) - x_hat * tl.load(mean_wdy_x_hat + group)) * rstd_group
    tl.store(dx + offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


_tile_moments = TritonKernel(_tile_moments_kernel)
_group_moments = TritonKernel(_group_moments_kernel)
_normalise = TritonKernel(_normalise_kernel)
_tile_sums = TritonKernel(_tile_sums_kernel)
_group_sums = TritonKernel(_group_sums_kernel)
_dx = TritonKernel(_dx_kernel)


def _moments(x: Tensor, groups: Groups, eps: float, num_warps: int) -> tuple[Tensor, Tensor]:
    """Mean and rstd of each group."""
    number = groups.B * groups.G
    tiles = scratch((2, number, groups.tiles), torch.float32, x.device)
    _tile_moments((number * groups.tiles,), (*tiles, x, *groups.sizes), groups.blocks, num_warps=num_warps)
    mean, rstd = scratch((2, number), torch.float32, x.device)
    parameters = (mean, rstd, *tiles, groups.C, groups.S, eps)
    _group_moments((number,), parameters, (*groups.blocks, 128), num_warps=4)
    return mean, rstd


def launch(
    y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups, eps: float, num_warps: int
) -> None:
    """The forward.   x, y: dense.   weight, bias: contiguous."""
    mean, rstd = _moments(x, groups, eps, num_warps)
    parameters = (y, x, mean, rstd, weight, bias, *groups.sizes)
    _normalise((groups.B * groups.G * groups.tiles,), parameters, groups.blocks, num_warps=num_warps)


def launch_backward(
    dx: Tensor, dy: Tensor, x: Tensor, weight: Tensor | None, groups: Groups, eps: float, num_warps: int
) -> Tensor:
    """Writes dx.   Returns the partial sums of dweight and of dbias: (2, rows, channels) float32."""
    mean, rstd = _moments(x, groups, eps, num_warps)
    number = groups.B * groups.G
    partials = scratch((2, groups.B * groups.tiles_s, groups.G * groups.C), torch.float32, x.device)
    grid = (number * groups.tiles,)
    _tile_sums(grid, (*partials, dy, x, mean, rstd, *groups.sizes), groups.blocks, num_warps=num_warps)
    sums = scratch((2, number), torch.float32, x.device)
    parameters = (*sums, *partials, weight, groups.G, groups.C, groups.S, groups.tiles_s)
    _group_sums((number,), parameters, (32, 32), num_warps=4)
    _dx(grid, (dx, dy, x, mean, rstd, *sums, weight, *groups.sizes), groups.blocks, num_warps=num_warps)
    return partials
