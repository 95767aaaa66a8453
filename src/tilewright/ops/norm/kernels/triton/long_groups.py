"""GroupNorm in Triton, groups too long for the registers of a program.  A sample is divided into tiles, one a program.

A tile has neighbouring channels, of whatever groups, so that channels_last tensors are read in whole sectors; its sums
are those of each of its channels.
Forward:   mean and variance of the channels of each tile; of each group, from those (Chan, Golub, LeVeque, 1983); y.
Backward:  the same, and with the mean m of a channel in a tile the sums of dy * (x - m) and of dy; from those of each
           group sum(wdy), dot(wdy, x_hat) and the sums of its channels, which are dweight and dbias of a sample; dx.
Traffic: the forward reads x twice, the backward x and dy; small tensors are read again from L2.
Which tiles there are depends on the sizes of a sample alone, so it has the same bits in any batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.affine import load_bias, load_weight
from tilewright.ops.norm.kernels.triton.group_tiles import Groups
from tilewright.ops.norm.kernels.triton.moments import sum_pair, variance_of

SEGMENT = 64  # channels of a tile where they are neighbours in memory: 128 bytes of 16-bit elements
BLOCK = 1024  # results of tiles that a program combines at once


class Tiles(NamedTuple):
    """Tiles (block_c, block_s) of the B samples of `groups`."""

    groups: Groups
    block_c: int
    block_s: int

    @property
    def tiles_s(self) -> int:
        """Tiles of one channel."""
        return triton.cdiv(self.groups.S, self.block_s)

    @property
    def grid(self) -> tuple[int]:
        """A program for each tile."""
        return (self.groups.B * triton.cdiv(self.groups.G * self.groups.C, self.block_c) * self.tiles_s,)

    @property
    def combined(self) -> tuple[int, int]:
        """BLOCK_T and BLOCK_C of the kernels that combine tiles."""
        block_c = min(32, triton.next_power_of_2(self.groups.C))
        return BLOCK // block_c, block_c


def tiles_of(groups: Groups, tile: int) -> Tiles:
    """Tiles of at most `tile` elements, long in the direction of stride 1."""
    block_c, block_s = triton.next_power_of_2(groups.G * groups.C), triton.next_power_of_2(groups.S)
    if groups.stride_c == 1 and groups.S > 1:
        block_c = min(block_c, SEGMENT)
        block_s = min(block_s, tile // block_c)
    else:
        block_s = min(block_s, tile)
        block_c = min(block_c, tile // block_s)
    return Tiles(groups, block_c, block_s)


@triton.jit
def _tile(CHANNELS, S, stride_b, stride_c, stride_s, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sample, channels (BLOCK_C,) and their mask, offsets and mask (BLOCK_C, BLOCK_S), and where the results of this
    tile's channels are in (B, tiles_s, CHANNELS).
    """
    tiles_c, tiles_s = tl.cdiv(CHANNELS, BLOCK_C), tl.cdiv(S, BLOCK_S)
    tile_s, tile_c = tl.program_id(0) % tiles_s, tl.program_id(0) // tiles_s % tiles_c
    b = (tl.program_id(0) // tiles_s // tiles_c).to(tl.int64)
    channels = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_s = tile_s * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_c = channels < CHANNELS
    offsets = b * stride_b + channels.to(tl.int64)[:, None] * stride_c + offs_s.to(tl.int64)[None, :] * stride_s
    return b, channels, mask_c, offsets, mask_c[:, None] & (offs_s < S)[None, :], (b * tiles_s + tile_s) * CHANNELS


@triton.jit
def _centred_channels(x_fp32, mask, S, BLOCK_S: tl.constexpr):
    """Mean and variance of each channel of a tile, and x - mean."""
    tile_s = tl.program_id(0) % tl.cdiv(S, BLOCK_S)
    inv_n = tl.div_rn(1.0, tl.minimum(S - tile_s * BLOCK_S, BLOCK_S).to(tl.float32))
    mean = tl.sum(x_fp32, 1) * inv_n
    centred = tl.where(mask, x_fp32 - mean[:, None], 0.0)
    deviation, square = sum_pair(centred, centred * centred, 1)
    shift, variance = variance_of(deviation, square, inv_n)
    return mean + shift, variance, centred - shift[:, None]


@triton.jit
def _tile_moments_kernel(
    means, variances, x, CHANNELS, S, stride_b, stride_c, stride_s,  # means, variances: (B, tiles_s, CHANNELS)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip  # x: (B, CHANNELS, S)
    _, channels, mask_c, offsets, mask, first = _tile(CHANNELS, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S)
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    mean, variance, _ = _centred_channels(x_fp32, mask, S, BLOCK_S)
    tl.store(means + first + channels, mean, mask=mask_c)
    tl.store(variances + first + channels, variance, mask=mask_c)


@triton.jit
def _tile_sums_kernel(
    means, variances, products, sums, dy, x, CHANNELS, S, stride_b, stride_c, stride_s,  # all: (B, tiles_s, CHANNELS)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip  # dy, x: (B, CHANNELS, S)
    """The moments, and the sums of dy * (x - mean) and of dy, of each channel of a tile."""
    _, channels, mask_c, offsets, mask, first = _tile(CHANNELS, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S)
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    dy_fp32 = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    mean, variance, centred = _centred_channels(x_fp32, mask, S, BLOCK_S)
    product, total = sum_pair(dy_fp32 * centred, dy_fp32, 1)
    tl.store(means + first + channels, mean, mask=mask_c)
    tl.store(variances + first + channels, variance, mask=mask_c)
    tl.store(products + first + channels, product, mask=mask_c)
    tl.store(sums + first + channels, total, mask=mask_c)


@triton.jit
def _results(start_c, start_t, G, C, S, TILES_S, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Offsets (BLOCK_T, BLOCK_C) of results of this program's group, their mask, and the elements of each."""
    tile_s, offs_c = start_t + tl.arange(0, BLOCK_T), start_c + tl.arange(0, BLOCK_C)
    mask = (tile_s < TILES_S)[:, None] & (offs_c < C)[None, :]
    row = (tl.program_id(0) // G).to(tl.int64) * TILES_S + tile_s
    offsets = row[:, None] * G * C + (tl.program_id(0) % G * C + offs_c)[None, :]
    count = tl.minimum(S - tile_s * BLOCK_S, BLOCK_S).to(tl.float32)
    return offsets, mask, tl.where(mask, count[:, None], 0.0)


@triton.jit
def _moments_of_group(
    means, variances, G, C, S, TILES_S, eps, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Mean and rstd.  With n_t elements of a channel in tile t:   mean = sum(n_t * mean_t) / n,
    variance = sum(n_t * (variance_t + (mean_t - mean)^2)) / n.
    """
    inv_n = tl.div_rn(1.0, (C + 0.0) * S)
    # First pass: the mean
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start_c in range(0, C, BLOCK_C):
        for start_t in range(0, TILES_S, BLOCK_T):
            offsets, mask, count = _results(start_c, start_t, G, C, S, TILES_S, BLOCK_S, BLOCK_T, BLOCK_C)
            sums += count * tl.load(means + offsets, mask=mask, other=0.0)
    mean = tl.sum(tl.sum(sums, 1), 0) * inv_n
    # Second pass: deviations from the mean, and squares
    deviations = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start_c in range(0, C, BLOCK_C):
        for start_t in range(0, TILES_S, BLOCK_T):
            offsets, mask, count = _results(start_c, start_t, G, C, S, TILES_S, BLOCK_S, BLOCK_T, BLOCK_C)
            deviation = tl.load(means + offsets, mask=mask, other=0.0) - mean
            deviations += count * deviation
            squares += count * (tl.load(variances + offsets, mask=mask, other=0.0) + deviation * deviation)
    shift, variance = variance_of(tl.sum(tl.sum(deviations, 1), 0), tl.sum(tl.sum(squares, 1), 0), inv_n)
    return mean + shift, tl.rsqrt(variance + eps)


@triton.jit
def _group_moments_kernel(
    mean, rstd, means, variances, G, C, S, TILES_S, eps,  # mean, rstd: (B * G,)   means, variances: (B, TILES_S, G * C)
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group_mean, group_rstd = _moments_of_group(means, variances, G, C, S, TILES_S, eps, BLOCK_S, BLOCK_T, BLOCK_C)
    tl.store(mean + tl.program_id(0), group_mean)
    tl.store(rstd + tl.program_id(0), group_rstd)


@triton.jit
def _group_sums_kernel(
    mean, rstd, mean_wdy, mean_wdy_x_hat, dw_partial, db_partial, means, variances, products, sums, weight, G, C, S,
    TILES_S, eps, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip  # mean ..: (B * G,)   partial: (B, G * C)   means ..: (B, TILES_S, G * C)
    """The moments, (1 / n) * sum(wdy) and (1 / n) * dot(wdy, x_hat) of each group; dw and db of its channels."""
    group = tl.program_id(0)
    group_mean, group_rstd = _moments_of_group(means, variances, G, C, S, TILES_S, eps, BLOCK_S, BLOCK_T, BLOCK_C)
    acc_wdy = tl.zeros((BLOCK_C,), tl.float32)
    acc_wdy_x_hat = tl.zeros((BLOCK_C,), tl.float32)
    for start_c in range(0, C, BLOCK_C):
        dw = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        db = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for start_t in range(0, TILES_S, BLOCK_T):
            offsets, mask, _ = _results(start_c, start_t, G, C, S, TILES_S, BLOCK_S, BLOCK_T, BLOCK_C)
            total = tl.load(sums + offsets, mask=mask, other=0.0)
            # dot(dy, x - mean) from dot(dy, x - mean_t)
            shift = tl.load(means + offsets, mask=mask, other=0.0) - group_mean
            dw += tl.load(products + offsets, mask=mask, other=0.0) + shift * total
            db += total
        dw_channels, db_channels = sum_pair(dw * group_rstd, db, 0)
        offs_c = start_c + tl.arange(0, BLOCK_C)
        channels = group % G * C + offs_c
        partial_offsets = (group // G).to(tl.int64) * G * C + channels
        tl.store(dw_partial + partial_offsets, dw_channels, mask=offs_c < C)
        tl.store(db_partial + partial_offsets, db_channels, mask=offs_c < C)
        w = load_weight(weight, channels, offs_c < C)
        acc_wdy += w * db_channels
        acc_wdy_x_hat += w * dw_channels
    inv_n = tl.div_rn(1.0, (C + 0.0) * S)
    tl.store(mean + group, group_mean)
    tl.store(rstd + group, group_rstd)
    tl.store(mean_wdy + group, tl.sum(acc_wdy, 0) * inv_n)
    tl.store(mean_wdy_x_hat + group, tl.sum(acc_wdy_x_hat, 0) * inv_n)


@triton.jit
def _normalise_kernel(
    y, x, mean, rstd, weight, bias, G, C, S, stride_b, stride_c, stride_s,  # weight, bias: (G * C,)
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * weight + bias."""
    b, channels, mask_c, offsets, mask, _ = _tile(G * C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S)
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    group = b * G + channels // C
    mean_c = tl.load(mean + group, mask=mask_c, other=0.0)[:, None]
    rstd_c = tl.load(rstd + group, mask=mask_c, other=0.0)[:, None]
    w, bias_c = load_weight(weight, channels, mask_c), load_bias(bias, channels, mask_c)
    y_fp32 = (x_fp32 - mean_c) * rstd_c * w[:, None] + bias_c[:, None]
    tl.store(y + offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _dx_kernel(
    dx, dy, x, mean, rstd, mean_wdy, mean_wdy_x_hat, weight, G, C, S, stride_b, stride_c, stride_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (wdy - (1 / n) * sum(wdy) - x_hat * (1 / n) * dot(wdy, x_hat)), wdy = weight * dy."""
    b, channels, mask_c, offsets, mask, _ = _tile(G * C, S, stride_b, stride_c, stride_s, BLOCK_C, BLOCK_S)
    x_fp32 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    dy_fp32 = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    group = b * G + channels // C
    rstd_c = tl.load(rstd + group, mask=mask_c, other=0.0)[:, None]
    x_hat = (x_fp32 - tl.load(mean + group, mask=mask_c, other=0.0)[:, None]) * rstd_c
    mean_wdy_c = tl.load(mean_wdy + group, mask=mask_c, other=0.0)[:, None]
    mean_wdy_x_hat_c = tl.load(mean_wdy_x_hat + group, mask=mask_c, other=0.0)[:, None]
    wdy = dy_fp32 * load_weight(weight, channels, mask_c)[:, None]
    dx_fp32 = (wdy - mean_wdy_c - x_hat * mean_wdy_x_hat_c) * rstd_c
    tl.store(dx + offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


_tile_moments = TritonKernel(_tile_moments_kernel)
_tile_sums = TritonKernel(_tile_sums_kernel)
_group_moments = TritonKernel(_group_moments_kernel)
_group_sums = TritonKernel(_group_sums_kernel)
_normalise = TritonKernel(_normalise_kernel)
_dx = TritonKernel(_dx_kernel)


def launch(
    y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, tiles: Tiles, eps: float, num_warps: int
) -> None:
    """The forward.   x, y: dense.   weight, bias: contiguous."""
    b, g, c, s, *strides = tiles.groups[:7]
    blocks = tiles.block_c, tiles.block_s
    means, variances = scratch((2, b * tiles.tiles_s, g * c), torch.float32, x.device)
    _tile_moments(tiles.grid, (means, variances, x, g * c, s, *strides), blocks, num_warps=num_warps)
    mean, rstd = scratch((2, b * g), torch.float32, x.device)
    parameters = (mean, rstd, means, variances, g, c, s, tiles.tiles_s, eps)
    _group_moments((b * g,), parameters, (tiles.block_s, *tiles.combined), num_warps=4)
    _normalise(tiles.grid, (y, x, mean, rstd, weight, bias, g, c, s, *strides), blocks, num_warps=num_warps)


def launch_backward(
    dx: Tensor, dy: Tensor, x: Tensor, weight: Tensor | None, tiles: Tiles, eps: float, num_warps: int
) -> Tensor:
    """Writes dx.   Returns the sums of dweight and of dbias of each sample: (2, B, channels) float32."""
    b, g, c, s, *strides = tiles.groups[:7]
    blocks = tiles.block_c, tiles.block_s
    results = scratch((4, b * tiles.tiles_s, g * c), torch.float32, x.device)
    _tile_sums(tiles.grid, (*results, dy, x, g * c, s, *strides), blocks, num_warps=num_warps)
    of_groups, partials = scratch((4, b * g), torch.float32, x.device), scratch((2, b, g * c), torch.float32, x.device)
    parameters = (*of_groups, *partials, *results, weight, g, c, s, tiles.tiles_s, eps)
    _group_sums((b * g,), parameters, (tiles.block_s, *tiles.combined), num_warps=4)
    parameters = (dx, dy, x, *of_groups, weight, g, c, s, *strides)
    _dx(tiles.grid, parameters, blocks, num_warps=num_warps)
    return partials
