"""The float8 forward kernel: one tile of queries of one head, an online softmax along the tiles of keys it may see.

Probabilities are 2^8 times e^(s - top), rounded to e4m3: the largest is 256, exactly.  The product with V of each tile
starts at zero and is added to the running sum in float32, because Hopper's matrix units keep 14 bits of a float8 sum;
so a scale for each block of values costs one product more, and a scale for each head none.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.attention.engines.triton_scores import (
    LN2,
    LOG2E,
    MINUS_INFINITY,
    describe,
    keys_of_tile,
    place,
    rows,
    store_rows,
    transformed,
    visible,
)
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK as TOKENS
from tilewright.ops.attention.fmha_fp8.rounding import SHIFT as EXPONENT
from tilewright.ops.quant.triton_numbers import decode

SCALE_BLOCK = tl.constexpr(TOKENS)
SHIFT = tl.constexpr(float(EXPONENT))


@triton.jit
def _operand(x):  # e4m3, or bytes of it where a GPU has no such type -> what tl.dot multiplies
    if x.dtype == tl.uint8:
        x = decode(x).to(tl.float16)  # every e4m3 number is one of float16
    return x


@triton.jit
def forward_kernel(
    o, lse, q, k, v, q_scale, k_scale, v_scale, sinks, data, counts, indices,  # o: (B, H, S_q, D_V)
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   k, v: (B, H // group, S_k, .)
    stride_ob, stride_oh, stride_os, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_qsb, stride_qsh, stride_qsn, stride_ksb, stride_ksh, stride_ksn, stride_vsb, stride_vsh, stride_vsn,
    stride_table_b, stride_table_h, pitch,
    D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, GENERAL: tl.constexpr,
    RAGGED: tl.constexpr, DESCRIPTORS: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = v_scale * softmax(s) v, lse = log of the sum of e^s, s = scale * q_scale * k_scale * q k^T.

    K_BLOCKS, V_BLOCKS: scales of keys and of values change along the sequence.
    TURNED: v is (B, H // group, D_V, S_k).
    """
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tiles = tl.cdiv(S_q, BLOCK_M)
    tile_m, head = place(tl.program_id(0), tiles, B * H, chunk, RIGHT and not LEFT)
    b, h = head // H, head % H
    h_kv = h // group
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    o += b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    k_tiles, v_tiles = k, v
    if DESCRIPTORS:
        heads_kv = H // group
        k_tiles = describe(k, B, heads_kv, S_k, stride_kb, stride_kh, stride_ks, D, WIDTH, BLOCK_N)
        if TURNED:
            v_tiles = tl.make_tensor_descriptor(
                v, [B, heads_kv, D_V, S_k], [stride_vb, stride_vh, stride_vs, 1], [1, 1, WIDTH_V, BLOCK_N]
            )
        else:
            v_tiles = describe(v, B, heads_kv, S_k, stride_vb, stride_vh, stride_vs, D_V, WIDTH_V, BLOCK_N)
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    k_scale += b * stride_ksb + h_kv * stride_ksh
    v_scale += b * stride_vsb + h_kv * stride_vsh

    # Which tiles of keys: from the last to the first of a band, or as a table lists them
    start_m = tile_m * BLOCK_M
    p0 = start_m + S_k - S_q
    p1 = tl.minimum(start_m + BLOCK_M, S_q) - 1 + S_k - S_q
    if PROGRAM != "":
        line = b * stride_table_b + h * stride_table_h + tile_m
        partial = tl.load(counts + line * 2)
        count = partial + tl.load(counts + line * 2 + 1)
        indices += line.to(tl.int64) * pitch
    else:
        first, end, whole_from, whole_to = keys_of_tile(p0, p1, S_k, left, right, BLOCK_N, LEFT, RIGHT)
        count = tl.maximum(end - first, 0)

    positions = p0 + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    # A tile of queries lies inside a block of one scale
    scale *= tl.load(q_scale + b * stride_qsb + h * stride_qsh + start_m // SCALE_BLOCK * stride_qsn)
    if not K_BLOCKS:
        scale *= tl.load(k_scale)
    factor = 1.0 if GENERAL else scale * LOG2E
    q_tile = _operand(rows(q, None, b, h, start_m, S_q, stride_qs, 0, WIDTH, D, BLOCK_M, False))
    m = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, WIDTH_V), tl.float32)

    for e in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + e).to(tl.int32) * BLOCK_N
        else:
            start = (end - 1 - e) * BLOCK_N
        k_tile = rows(k, k_tiles, b, h_kv, start, S_k, stride_ks, 0, WIDTH, D, BLOCK_N, DESCRIPTORS)
        s = tl.dot(q_tile, _operand(k_tile).T)
        keys = start + offs_n
        if GENERAL:
            of_tile = scale
            if K_BLOCKS:
                of_tile = scale * tl.load(k_scale + start // SCALE_BLOCK * stride_ksn)
            s, _ = transformed(s, positions[:, None], keys[None, :], of_tile, softcap, 0.0, SOFTCAP, False)
        if MASKED:
            if PROGRAM != "":
                is_partial = e < partial
            else:
                is_partial = (start < whole_from * BLOCK_N) | (start >= whole_to * BLOCK_N)
            if is_partial:
                seen = visible(positions[:, None], keys[None, :], S_k, left, right, data, b, h, LEFT, RIGHT, PROGRAM)
                s = tl.where(seen, s, MINUS_INFINITY)
        new = tl.maximum(m, tl.max(s, 1))
        base = new * factor
        if MASKED:
            base = tl.where(new == MINUS_INFINITY, 0.0, base)
        p = tl.exp2(s * factor - (base - SHIFT)[:, None])
        alpha = tl.exp2(m * factor - base)
        total = total * alpha + tl.sum(p, 1)
        m = new
        if TURNED:
            v_tile = v_tiles.load([b, h_kv, 0, start]).reshape(WIDTH_V, BLOCK_N).T
        else:
            v_tile = rows(v, v_tiles, b, h_kv, start, S_k, stride_vs, 0, WIDTH_V, D_V, BLOCK_N, DESCRIPTORS)
        v_tile = _operand(v_tile)
        product = tl.dot(p.to(v_tile.dtype), v_tile)
        if V_BLOCKS:
            product *= tl.load(v_scale + start // SCALE_BLOCK * stride_vsn)
        acc = acc * alpha[:, None] + product

    # A row without keys has total = 0; what its accumulator holds may be 0 * NaN
    m2 = m * factor - SHIFT  # total is 2^8 times what it stands for
    nothing = total == 0.0
    share = tl.full((BLOCK_M,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2E
        top = tl.maximum(m2, sink)
        base = tl.where(top == MINUS_INFINITY, 0.0, top)
        share = tl.exp2(m2 - base)
        total = total * share + tl.exp2(sink - base)
        m2 = top
    share = tl.where(total == 0.0, 0.0, share / total)
    log = tl.where(total == 0.0, MINUS_INFINITY, (m2 + tl.log2(total)) * LN2)
    if not V_BLOCKS:
        share *= tl.load(v_scale)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse + head.to(tl.int64) * S_q + offs_m, log, mask=offs_m < S_q)
    acc = tl.where(nothing[:, None], 0.0, acc * share[:, None])
    store_rows(o, acc, start_m, S_q, stride_os, 0, D_V)
