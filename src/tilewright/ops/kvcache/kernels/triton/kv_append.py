"""New tokens into a KV cache in Triton: copies from packed rows to the slots of a table.

A program moves a few heads of K or of V of a few tokens, whole heads at a time, so that each is one contiguous run of
the cache, and the amax of a head that is stored in e4m3 stays in its program.  Programs read `lengths`, the end of
their sequence and one entry of the table, then k and v once.

Traffic: at bf16 each element is read and written once, 8*T*H_kv*D bytes for K and V: T=8192, H_kv=8, D=128 cannot beat
16 us at 4.2 TB/s, and to e4m3 not 12.  A single token is bound by the chain length, table, store: three trips to
memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.dependent import DependentKernel, wait_and_launch_dependents
from tilewright.ops.kvcache.kernels.triton import slots
from tilewright.ops.kvcache.kernels.triton.slots import store_heads, token_position, token_slot
from tilewright.ops.kvcache.kv_append_ import FORWARD, KvAppendArgs, KvAppendBucket
from tilewright.ops.quant.kernels.triton.numbers import as_stored
from tilewright.ops.rows import no_float64

FILL = 512  # minimum programs before tiles grow: about four for each SM of an H200
THREAD_BYTES = 16  # of a row: one vector a thread and row


class Config(NamedTuple):
    tokens: int
    heads: int
    num_warps: int


def tile(head_rows: int, heads: int, row_bytes: int) -> Config:
    """The largest tile that still gives every SM work: 32 bytes a thread of four warps, down to 16 of one."""
    most_heads = min(4, triton.next_power_of_2(heads))
    for warps, vectors in ((4, 2), (2, 1), (1, 1)):
        rows = max(1, warps * vectors * 32 * THREAD_BYTES // row_bytes)
        each = min(rows, most_heads)
        if head_rows >= FILL * rows:
            return Config(rows // each, each, warps)
    return Config(rows // each, each, 1)


def configure(bucket: KvAppendBucket, dtype: torch.dtype) -> Config:
    row_bytes = min(max(32, triton.next_power_of_2(bucket.D) * dtype.itemsize), 512)
    return tile(2 * bucket.T * bucket.H_kv, bucket.H_kv, row_bytes)


def candidates(bucket: KvAppendBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 16 to 128 bytes a thread."""
    row_bytes = triton.next_power_of_2(bucket.D) * dtype.itemsize
    return tuple(
        Config(tokens, heads, warps)
        for warps in (1, 2, 4, 8)
        for heads in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8, 16, 32)
        if tokens <= bucket.T and heads <= triton.next_power_of_2(bucket.H_kv)
        if 16 <= tokens * heads * row_bytes // (32 * warps) <= 128
    )


CONFIGS = tuple(
    dict.fromkeys(
        configure(KvAppendBucket(t, h, d, 0), torch.bfloat16)
        for h, d in ((8, 128), (2, 16), (1, 64), (8, 256))
        for t in (1, 64, 256, 1024, 8192)
    )
)


@triton.jit
def _kv_append_kernel(
    k_cache, v_cache, k, v, k_scale, v_scale,  # caches: (pages, page_size, H, D)   k, v: (T, H, D)
    lengths, cu_seqlens, block_table, B, new, table_b, table_p, max_pages, pages, page_size, T, H, groups,
    k_cache_p, k_cache_s, k_cache_h, k_cache_d, k_t, k_h, k_d, k_scale_p, k_scale_s, k_scale_h,
    v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
    D: tl.constexpr, D_V: tl.constexpr, KIND: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_and_launch_dependents(DEPENDENT)
    # Find the slots of a tile of tokens
    group = tl.program_id(0) % (2 * groups)
    token = tl.program_id(0) // (2 * groups) * TOKENS + tl.arange(0, TOKENS)
    sequence, position, live = token_position(token, T, lengths, cu_seqlens, B, new, BLOCK_B)
    page, place, stored = token_slot(
        sequence, position, live, block_table, table_b, table_p, max_pages, pages, page_size
    )  # fmt: skip
    # Copy heads of K, or of V
    if group < groups:
        store_heads(
            k_cache, k, k_scale, token, page, place, stored, group, H,
            k_cache_p, k_cache_s, k_cache_h, k_cache_d, k_t, k_h, k_d, k_scale_p, k_scale_s, k_scale_h,
            D, KIND, HEADS, BLOCK_D,
        )  # fmt: skip
    else:
        store_heads(
            v_cache, v, v_scale, token, page, place, stored, group - groups, H,
            v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
            D_V, KIND, HEADS, BLOCK_DV,
        )  # fmt: skip


_kernel = DependentKernel(_kv_append_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, ...], args: KvAppendArgs, config: Config) -> None:
    k, v, k_scale, v_scale = args.k, args.v, args.k_scale, args.v_scale
    k_cache, v_cache = as_stored(args.k_cache), as_stored(args.v_cache)
    kind = slots.scale_kind(k_scale)
    if kind == 1:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    (tokens, h, d), d_v = k.shape, v.shape[2]
    table, block_b = slots.table(k_cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    groups = triton.cdiv(h, config.heads)
    tensors = (k_cache, v_cache, k, v, k_scale, v_scale)
    strides = (*slots.strides(k_cache, k, k_scale), *slots.strides(v_cache, v, v_scale))
    blocks = (triton.next_power_of_2(d), triton.next_power_of_2(d_v), block_b)
    constants = (d, d_v, kind, config.tokens, config.heads, *blocks)
    grid = (triton.cdiv(tokens, config.tokens) * 2 * groups,)
    _kernel(grid, (*tensors, *table, tokens, h, groups, *strides), constants, num_warps=config.num_warps)
