"""Pages of a KV cache copied inside of it, in Triton.

A page is page_size * H_kv heads of one token each.  A program copies a few of them from one page of K, or of V, to
another, with their scales; its pair stands in two tensors that it reads first.

Traffic: every page is read once and written once: 256 pages of 16 tokens, H_kv=8, D=128, bf16, K and V, cannot take
less than 8 us at 4.2 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.kvcache.kv_copy_pages_ import FORWARD, KvCopyPagesArgs, KvCopyPagesBucket
from tilewright.ops.kvcache.layout import as_bytes
from tilewright.ops.rows import no_float64

FILL = 512  # minimum programs before tiles grow: about four for each SM of an H200


class Config(NamedTuple):
    rows: int  # heads of tokens a program
    num_warps: int


def configure(bucket: KvCopyPagesBucket, dtype: torch.dtype) -> Config:
    """64 bytes a thread, or 16 where programs would be few."""
    row_bytes = min(max(32, triton.next_power_of_2(bucket.D) * dtype.itemsize), 512)
    rows_of_all = 2 * bucket.N * bucket.page_size * bucket.H_kv
    for warps, vectors in ((4, 4), (4, 1), (1, 1)):
        rows = max(1, warps * vectors * 512 // row_bytes)
        if rows_of_all >= FILL * rows:
            return Config(rows, warps)
    return Config(rows, 1)


def candidates(bucket: KvCopyPagesBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 16 to 128 bytes a thread."""
    row_bytes = triton.next_power_of_2(bucket.D) * dtype.itemsize
    return tuple(
        Config(rows, warps)
        for warps in (1, 2, 4, 8)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
        if rows <= bucket.page_size * bucket.H_kv and 16 <= rows * row_bytes // (32 * warps) <= 128
    )


CONFIGS = tuple(
    dict.fromkeys(
        configure(KvCopyPagesBucket(n, 16, h, d), torch.bfloat16)
        for h, d in ((8, 128), (2, 16))
        for n in (1, 16, 256, 2048)
    )
)


@triton.jit
def _copy_pages_kernel(
    k_cache, v_cache, k_scale, v_scale, src, dst, pages, page_size, H, blocks,  # caches: (pages, page_size, H, D)
    src_n, dst_n, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d, ks_p, ks_s, ks_h, vs_p, vs_s, vs_h,  # strides
    D: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) // (2 * blocks)
    block = tl.program_id(0) % (2 * blocks)
    source = tl.load(src + pair * src_n).to(tl.int64)
    target = tl.load(dst + pair * dst_n).to(tl.int64)
    if (source >= 0) & (target >= 0) & (source < pages) & (target < pages):
        if block < blocks:
            _copy(
                k_cache, k_scale, source, target, block, page_size, H, k_p, k_s, k_h, k_d, ks_p, ks_s, ks_h,
                D, ROWS, BLOCK_D,
            )  # fmt: skip
        else:
            _copy(
                v_cache, v_scale, source, target, block - blocks, page_size, H, v_p, v_s, v_h, v_d, vs_p, vs_s, vs_h,
                D_V, ROWS, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def _copy(
    cache, scale, source, target, block, page_size, H, cache_p, cache_s, cache_h, cache_d, scale_p, scale_s, scale_h,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy ROWS heads of tokens of a page, and their scales."""
    row = block * ROWS + tl.arange(0, ROWS)
    row_mask = row < page_size * H
    place, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    offs = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    mask = row_mask[:, None] & (offs < D)
    pointers = cache + (place * cache_s + h * cache_h)[:, None] + offs * cache_d
    tl.store(pointers + target * cache_p, tl.load(pointers + source * cache_p, mask=mask), mask=mask)
    if scale is not None:
        scales = scale + place * scale_s + h * scale_h
        tl.store(scales + target * scale_p, tl.load(scales + source * scale_p, mask=row_mask), mask=row_mask)


_kernel = TritonKernel(_copy_pages_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, ...], args: KvCopyPagesArgs, config: Config) -> None:
    pairs = args.src.shape[0]
    if not pairs:
        return
    k_cache, v_cache, scales = as_bytes(args.k_cache), as_bytes(args.v_cache), (args.k_scale, args.v_scale)
    pages, page_size, h, d = k_cache.shape
    d_v = v_cache.shape[3]
    blocks = triton.cdiv(page_size * h, config.rows)
    scale_strides = [n for t in scales for n in ((0, 0, 0) if t is None else t.stride())]
    strides = (args.src.stride(0), args.dst.stride(0), *k_cache.stride(), *v_cache.stride(), *scale_strides)
    arguments = (k_cache, v_cache, *scales, args.src, args.dst, pages, page_size, h, blocks, *strides)
    constants = (d, d_v, config.rows, triton.next_power_of_2(d), triton.next_power_of_2(d_v))
    _kernel((pairs * 2 * blocks,), arguments, constants, num_warps=config.num_warps)
