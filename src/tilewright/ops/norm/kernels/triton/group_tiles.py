"""Groups of channels as tiles (BLOCK_C, BLOCK_S): addresses and sums that the kernels of GroupNorm share."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.norm.kernels.triton.moments import variance_of


class Groups(NamedTuple):
    """B samples of G groups of C channels at S positions, their strides in elements, and the tile of a program."""

    B: int
    G: int
    C: int
    S: int
    stride_b: int
    stride_c: int
    stride_s: int
    block_c: int
    block_s: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """G, C, S and the strides, as the kernels take them."""
        return self[1:7]

    @property
    def blocks(self) -> tuple[int, int]:
        """BLOCK_C and BLOCK_S."""
        return self.block_c, self.block_s

    @property
    def tiles_s(self) -> int:
        """Tiles of one channel."""
        return triton.cdiv(self.S, self.block_s)

    @property
    def tiles(self) -> int:
        """Tiles of one group."""
        return triton.cdiv(self.C, self.block_c) * self.tiles_s


def groups_of(x: Tensor, num_groups: int, tile: int, channels_last: bool) -> Groups:
    """The groups of a dense `x` (B, C, ...) and tiles of at most `tile` elements, long in the direction of stride 1."""
    batch, all_channels = x.shape[:2]
    channels, positions = all_channels // num_groups, x[0, 0].numel()
    block_c, block_s = triton.next_power_of_2(channels), triton.next_power_of_2(positions)
    if channels_last:
        block_c = min(block_c, tile)
        block_s = min(block_s, tile // block_c)
    else:
        block_s = min(block_s, tile)
        block_c = min(block_c, tile // block_s)
    strides = (1, all_channels) if channels_last else (positions, 1)
    return Groups(batch, num_groups, channels, positions, all_channels * positions, *strides, block_c, block_s)


@triton.jit
def tile_of(b, g, tile_c, tile_s, C, S, stride_b, stride_c, stride_s, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Offsets (BLOCK_C, BLOCK_S) of a tile of group g of sample b; channels (BLOCK_C,) and their mask; mask of the
    tile.
    """
    offs_c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_s = tile_s * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_c = offs_c < C
    channels = (g * C + offs_c).to(tl.int64)
    offsets = tl.cast(b, tl.int64) * stride_b + channels[:, None] * stride_c + offs_s.to(tl.int64)[None, :] * stride_s
    return offsets, channels, mask_c, mask_c[:, None] & (offs_s < S)[None, :]


@triton.jit
def sum_of(tile):
    """The sum of a tile (BLOCK_C, BLOCK_S)."""
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def centred_tile(x_fp32, mask, inv_n):
    """The mean of a tile, x - mean, and the variance.   inv_n: 1 / the elements in `mask`."""
    mean = sum_of(x_fp32) * inv_n
    centred = tl.where(mask, x_fp32 - mean, 0.0)
    shift, variance = variance_of(sum_of(centred), sum_of(centred * centred), inv_n)
    return mean + shift, tl.where(mask, centred - shift, 0.0), variance
