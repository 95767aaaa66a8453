"""New tokens into a cache of latent attention in Triton: two parts joined in the slot of a table, in one dtype or in
656 bytes.

A program moves a few whole tokens, so that each is one contiguous run of the cache, and the amax of 128 numbers stays
in its program.  Programs read `lengths`, the end of their sequence and one entry of the table, then both parts once.

Traffic: at bf16 each element is read and written once, 2304 bytes a token of 576: T=8192 cannot beat 4.5 us at 4.2
TB/s, and to 656 bytes not 3.5.  A single token is bound by the chain length, table, store: three trips to memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.kvcache.kernels.triton import slots
from tilewright.ops.kvcache.kernels.triton.slots import token_position, token_slot
from tilewright.ops.kvcache.mla_kv_append_ import FORWARD, MlaKvAppendArgs, MlaKvAppendBucket
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, VECTOR, is_aligned, is_packed
from tilewright.ops.quant.kernels.triton.numbers import as_stored, encode, inverse, magnitude, scale_of
from tilewright.ops.quant.numbers import E4M3
from tilewright.ops.rows import no_float64

SCALES_AT, ROPE_AT = tl.constexpr(512), tl.constexpr(528)  # bytes of a packed token
_FILL = 512  # minimum programs before tiles grow: about four for each SM of an H200


class Config(NamedTuple):
    tokens: int
    num_warps: int


def configure(bucket: MlaKvAppendBucket, dtype: torch.dtype) -> Config:
    """A warp for each token; more tokens a program where there are many."""
    for tokens in (4, 2):
        if _FILL * tokens <= bucket.T:
            return Config(tokens, tokens)
    return Config(1, 2)


def candidates(bucket: MlaKvAppendBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(tokens, warps)
        for tokens in (1, 2, 4, 8)
        for warps in (1, 2, 4, 8)
        if tokens <= bucket.T and 1 <= 4 * warps // tokens <= 16
    )


CONFIGS = (Config(1, 2), Config(2, 2), Config(4, 4))


def why_not(args: MlaKvAppendArgs) -> str | None:
    """Why the kernel cannot run, or None."""
    if is_packed(args.kv_cache) and not is_aligned(args.kv_cache):
        return f"writes tokens of {TOKEN_BYTES} bytes at multiples of {VECTOR} bytes"
    return no_float64(*args)


@triton.jit
def _mla_kv_append_kernel(
    cache, c_kv, k_pe,  # (pages, page_size, D_C + D_PE)   (T, D_C)   (T, D_PE)
    lengths, cu_seqlens, block_table, B, new, table_b, table_p, max_pages, pages, page_size, T,
    cache_p, cache_s, cache_d, c_t, c_d, pe_t, pe_d,
    D_C: tl.constexpr, D_PE: tl.constexpr, PACKED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_PE: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # Find the slots of a tile of tokens
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence, position, live = token_position(token, T, lengths, cu_seqlens, B, new, BLOCK_B)
    page, place, stored = token_slot(
        sequence, position, live, block_table, table_b, table_p, max_pages, pages, page_size
    )  # fmt: skip
    slot = page * cache_p + place * cache_s

    # Read both parts
    row = token.to(tl.int64)
    offs_pe = tl.arange(0, BLOCK_PE).to(tl.int64)
    pe_mask = stored[:, None] & (offs_pe < D_PE)[None, :]
    rope = tl.load(k_pe + row[:, None] * pe_t + offs_pe[None, :] * pe_d, mask=pe_mask, other=0.0)
    if PACKED:
        group, column = tl.arange(0, 4), tl.arange(0, 128)
        offs_c = (group[:, None] * 128 + column[None, :]).to(tl.int64)  # (4, 128)
        mask = stored[:, None, None]
        x = tl.load(c_kv + row[:, None, None] * c_t + offs_c[None, :, :] * c_d, mask=mask, other=0.0)
        # Quantise each 128 numbers, and write codes, scales and the rotated part
        scale = scale_of(tl.max(magnitude(x), 2), False)  # (TOKENS, 4)
        codes = encode(x.to(tl.float32) * inverse(scale)[:, :, None], cache)
        tl.store(cache + slot[:, None, None] + offs_c[None, :, :], codes, mask=mask)
        words = (cache + SCALES_AT).to(tl.pointer_type(tl.float32))
        tl.store(words + tl.multiple_of(slot >> 2, 4)[:, None] + group[None, :], scale, mask=stored[:, None])
        pairs = (cache + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
        tl.store(pairs + tl.multiple_of(slot >> 1, 8)[:, None] + offs_pe[None, :], rope.to(tl.bfloat16), mask=pe_mask)
    else:
        offs_c = tl.arange(0, BLOCK_C).to(tl.int64)
        mask = stored[:, None] & (offs_c < D_C)[None, :]
        x = tl.load(c_kv + row[:, None] * c_t + offs_c[None, :] * c_d, mask=mask, other=0.0)
        tl.store(cache + slot[:, None] + offs_c[None, :] * cache_d, x, mask=mask)
        tl.store(cache + slot[:, None] + (D_C + offs_pe)[None, :] * cache_d, rope, mask=pe_mask)


_kernel = TritonKernel(_mla_kv_append_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, ...], args: MlaKvAppendArgs, config: Config) -> None:
    c_kv, k_pe, packed = args.c_kv, args.k_pe, is_packed(args.kv_cache)
    cache = as_stored(args.kv_cache.view(E4M3)) if packed else args.kv_cache
    (tokens, d_c), d_pe = c_kv.shape, k_pe.shape[1]
    table, block_b = slots.table(cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    constants = (d_c, d_pe, packed, config.tokens, triton.next_power_of_2(d_c), triton.next_power_of_2(d_pe), block_b)
    strides = (*cache.stride(), *c_kv.stride(), *k_pe.stride())
    grid = (triton.cdiv(tokens, config.tokens),)
    _kernel(grid, (cache, c_kv, k_pe, *table, tokens, *strides), constants, num_warps=config.num_warps)
