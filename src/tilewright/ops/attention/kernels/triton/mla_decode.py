"""Latent attention of a few new tokens a sequence: the keys are divided among programs, then combined.

All heads read one cache, so that 128 heads are 128 rows for one key: for 16 heads the cache decides, for 128 the
products do, and two row tiles of 64 read each key tile, the second from the L2.  One key tile in shared memory is the
operand of both products.  The key tiles of all sequences are one line that is cut into equal shares
(`latent/division.py`), so that lengths do not matter and few results are partial; a second kernel combines these
(`latent/combine.py`), and on Hopper is launched before the first one ends.  Tokens of 656 bytes are widened on their
way to shared memory.

Traffic: the visible tokens once, and 8 * d_v bytes for each row of a segment that is not a whole sequence, written and
read.  (128, 128, 4096) at bf16 moves 604 MB, 137 us at 4.4 TB/s, and computes 146 GFLOP, 183 us at 800 TFLOP/s.
The shares follow FlashMLA's schedule (DeepSeek-AI, 2025).
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.kernels.triton.latent.launch import launch as launch_tile
from tilewright.ops.attention.kernels.triton.latent.launch import why_not, widths
from tilewright.ops.attention.kernels.triton.paged.launch import Tile, stages
from tilewright.ops.attention.kernels.triton.tiles import next_power_of_2
from tilewright.ops.attention.mla_decode import FORWARD
from tilewright.ops.attention.mla_decode.args import PACKED, MlaDecodeArgs, MlaDecodeBucket

_LEAST_ROWS, _MOST_ROWS = 16, 64


def _block_m(bucket: MlaDecodeBucket) -> int:
    """The rows of a sequence in one tile, or in several of 64: of 16 rows, the fewest that a matrix unit takes."""
    rows = bucket.H * (1 if bucket.sparse else bucket.S_q)
    return min(max(_LEAST_ROWS, next_power_of_2(rows)), _MOST_ROWS)


def _is_indirect(bucket: MlaDecodeBucket) -> bool:
    return bucket.page > 0 or bucket.sparse > 0


def configure(bucket: MlaDecodeBucket, dtype: torch.dtype) -> Tile:
    """On an H100, 128 x 4096 tokens: for 128 heads 64 keys took 599 us and 32 took 735, whose scores are products of 16
    columns; for 16 heads, bound by memory, four warps took 243 us and eight 284.
    """
    block_m = _block_m(bucket)
    if not bucket.aligned:
        return Tile(block_m, 32, 8, 1, 1)
    if widths(bucket.D, bucket.D_v).value <= 128:
        return Tile(block_m, 64, 4, stages(2, _is_indirect(bucket)))
    if block_m == _MOST_ROWS:
        return Tile(block_m, 64, 8, stages(2, _is_indirect(bucket)), 1)
    if bucket.cache == PACKED:  # four warps have no registers for what they widen
        return Tile(block_m, 32, 8, stages(2, _is_indirect(bucket)))
    return Tile(block_m, 32, 4, stages(3, _is_indirect(bucket)))


def candidates(bucket: MlaDecodeBucket, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles whose stages fit an H200."""
    columns, block_m, size = widths(bucket.D, bucket.D_v).all, _block_m(bucket), dtype.itemsize
    return tuple(
        Tile(block_m, block_n, warps, stages(depth, _is_indirect(bucket)), ctas)
        for block_n in (32, 64, 128)
        for warps in (4, 8)
        for depth in (2, 3, 4)
        for ctas in (1, 2)
        if ctas * size * columns * (block_m + depth * block_n) <= 227 << 10 and block_m * columns <= 5120 * warps
    )


CONFIGS = (
    *(Tile(m, 32, 8, 1, 1) for m in (16, 32, 64)),
    *(Tile(m, 64, 4, num_stages) for m in (16, 32, 64) for num_stages in (2, 3)),
    *(Tile(64, 64, 8, num_stages, 1) for num_stages in (2, 3)),
    *(Tile(m, 32, 4, num_stages) for m in (16, 32) for num_stages in (3, 5)),
    *(Tile(m, 32, 8, num_stages) for m in (16, 32) for num_stages in (2, 3)),
)


@register_kernel(
    FORWARD, configure=configure, config_type=Tile, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: MlaDecodeArgs, config: Tile) -> None:
    launch_tile(outs, args, config)
