"""Page lists in compressed rows as a block table, in Triton: a program writes some columns of a row.

Traffic: 4 bytes a page read and written: 256 sequences of 32768 pages of one token, 67 MB, 16 us at 4.2 TB/s; with
pages of 16 tokens 1 us, less than a launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.kvcache.kv_block_table import FORWARD, KvBlockTableArgs, KvBlockTableBucket


class Config(NamedTuple):
    columns: int  # a program
    num_warps: int


CONFIGS = (Config(256, 2), Config(2048, 4))


def configure(bucket: KvBlockTableBucket, dtype: torch.dtype) -> Config:
    """16 bytes a thread and load; narrow tables, most of all, in small programs.  Unmeasured."""
    return CONFIGS[0] if bucket.max_pages <= 1024 else CONFIGS[1]


def candidates(bucket: KvBlockTableBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return (*CONFIGS, Config(1024, 4), Config(4096, 8))


@triton.jit
def _block_table_kernel(
    table, lengths, indptr, indices, last, count, page_size, max_pages, blocks, indptr_n, indices_n, last_n,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start = tl.load(indptr + row.to(tl.int64) * indptr_n)
    pages = tl.load(indptr + (row.to(tl.int64) + 1) * indptr_n) - start
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    place = start.to(tl.int64) + column
    inside = (column < pages) & (place >= 0) & (place < count) & (column < max_pages)
    page = tl.load(indices + place * indices_n, mask=inside, other=0)
    tl.store(table + row.to(tl.int64) * max_pages + column, page, mask=column < max_pages)
    if block == 0:
        tokens = tl.load(last + row.to(tl.int64) * last_n)
        tl.store(lengths + row, tl.where(pages > 0, (pages - 1) * page_size + tokens, 0))


_kernel = TritonKernel(_block_table_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: KvBlockTableArgs, config: Config) -> None:
    (table, lengths), (batch, max_pages) = outs, outs[0].shape
    if not batch:
        return
    blocks = max(triton.cdiv(max_pages, config.columns), 1)
    strides = (args.indptr.stride(0), args.indices.stride(0), args.last_page_len.stride(0))
    tensors = (table, lengths, args.indptr, args.indices, args.last_page_len)
    sizes = (args.indices.shape[0], args.page_size, max_pages, blocks)
    _kernel((batch * blocks,), (*tensors, *sizes, *strides), (config.columns,), num_warps=config.num_warps)
