"""Attention of a few new tokens a sequence over a KV cache: the keys are divided among programs, then combined.

One token has too few rows to fill a GPU: batch 1 with 8 key heads is 8 independent problems for 132 multiprocessors.
So the keys of a sequence are cut into chunks, as many as fill the GPU whatever the lengths are; each program finds its
chunk on the device by a prefix sum over sequences (`paged/tasks.py`), and one that has none ends at once.  Query heads
of a key head and tokens are rows of one tile, so that a key is read once for all of them (`paged/attend.py`).  A second
kernel combines the chunks (`paged/combine.py`); on Hopper it is launched before the first one ends.

Traffic: the visible keys and values once, and 8 * D_v bytes for each row of a chunk, written and read.  (1, 32/8, 8192,
128) at bf16 moves 33.6 MB: 7.6 us at 4.4 TB/s; (32, 32/8, 4096, 128) 537 MB, 122 us.
The split follows Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), the one length of all chunks FlashInfer's plan.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.fmha_decode import FORWARD
from tilewright.ops.attention.kernels.triton.paged import tasks
from tilewright.ops.attention.kernels.triton.paged.launch import Form, Tile, fitted, stages, why_not, width
from tilewright.ops.attention.kernels.triton.paged.launch import launch as launch_form
from tilewright.ops.attention.kernels.triton.tiles import next_power_of_2
from tilewright.ops.attention.paged.args import PagedArgs, PagedBucket

_LEAST_ROWS, _MOST_ROWS = 16, 64


def _block_m(bucket: PagedBucket) -> int:
    """The rows of a sequence in one tile, or in several of 64: of 16 rows, the fewest that a matrix unit takes."""
    return min(max(_LEAST_ROWS, next_power_of_2(bucket.S_q * bucket.group)), _MOST_ROWS)


def configure(bucket: PagedBucket, dtype: torch.dtype) -> Tile:
    """Tiles of 16 KB of keys and of values at D = 128; two programs of a multiprocessor then fit an H200.  Not measured
    yet.
    """
    columns, block_m = width(bucket.D, bucket.D_v), _block_m(bucket)
    if not bucket.aligned:
        return Tile(block_m, 32, 4, 1)
    num_stages = stages(3, bucket.page > 0)
    if columns <= 128:
        return Tile(block_m, 64, 4, num_stages)
    return Tile(block_m, 32, 4 if block_m < 64 else 8, num_stages)


def candidates(bucket: PagedBucket, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles whose stages fit an H200 twice."""
    columns, block_m, size = width(bucket.D, bucket.D_v), _block_m(bucket), dtype.itemsize
    return tuple(
        Tile(block_m, block_n, warps, stages(depth, bucket.page > 0), ctas)
        for block_n in (32, 64, 128)
        for warps in (4, 8)
        for depth in (2, 3, 4)
        for ctas in (2, 3)
        if size * columns * (block_m + 2 * depth * block_n) <= 150 << 10 and block_m * columns <= 4096 * warps
    )


CONFIGS = (
    *(Tile(m, 32, 4, 1) for m in (16, 32, 64)),
    *(Tile(m, 64, 4, num_stages) for m in (16, 32, 64) for num_stages in (3, 5)),
    *(Tile(m, 32, 8 if m == 64 else 4, num_stages) for m in (16, 32, 64) for num_stages in (3, 5)),
)


@register_kernel(
    FORWARD, configure=configure, config_type=Tile, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: PagedArgs, config: Tile) -> None:
    attend(outs, args, config)


def attend(outs: tuple[Tensor, Tensor], args: PagedArgs, config: Tile, q_scale: Tensor | None = None) -> None:
    """The launches; q_scale as in `paged/launch.py`."""
    tile, batch = fitted(config, args), args.lengths.shape[0]
    rows = args.q.shape[0] // batch * (args.q.shape[1] // args.k_cache.shape[2])
    form = Form(tasks.ALL.value, 0, batch * -(-rows // tile.block_m), min(rows, tile.block_m))
    launch_form(outs, args, tile, form, q_scale)
