"""The kernel of latent attention over a KV cache: a program computes its share of the key tiles, for one row tile.

The rows of a tile are tokens times heads: all heads read the same keys.  A tile of tokens is loaded once and is the
operand of both products, S = Q C^T over all columns and O += P C over the first ones; the columns beyond a power of
two, the rotated part, have a product of their own.  An online softmax runs over key tiles.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.latent.division import cut, keys_of, line
from tilewright.ops.attention.kernels.triton.paged.attend import finish
from tilewright.ops.attention.kernels.triton.scores import LOG2E, MINUS_INFINITY
from tilewright.ops.quant.kernels.triton.numbers import decode

SCALES_AT, ROPE_AT = tl.constexpr(512), tl.constexpr(528)  # bytes of a packed token


@triton.jit
def _columns(base, row, in_range, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Columns FIRST .. FIRST + WIDTH of rows: (rows, WIDTH), 0 out of range."""
    offs_d = FIRST + tl.arange(0, WIDTH)
    pointers = base + row[:, None] + offs_d[None, :]
    if FIRST + WIDTH <= D:
        tile = tl.load(pointers, mask=in_range[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=in_range[:, None] & (offs_d < D)[None, :], other=0.0)
    return tile


@triton.jit
def _unpacked(base, row, in_range, DTYPE: tl.constexpr, E4M3: tl.constexpr):
    """The latents of packed tokens: (rows, 512) in DTYPE, each rounded once; 0 out of range."""
    group, column = tl.arange(0, 4), tl.arange(0, 128)
    codes = tl.load(
        base + row[:, None, None] + (group * 128)[None, :, None] + column[None, None, :],
        mask=in_range[:, None, None], other=0,
    )  # fmt: skip
    if E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        numbers = decode(codes)
    words = (base + SCALES_AT).to(tl.pointer_type(tl.float32))
    scales = tl.load(words + tl.multiple_of(row >> 2, 4)[:, None] + group[None, :], mask=in_range[:, None], other=0.0)
    return tl.reshape((numbers * scales[:, :, None]).to(DTYPE), (row.shape[0], 512))


@triton.jit
def attend_kernel(
    q, o, lse, partial_acc, partial_stat, kv, lengths, block_table, indices, sinks,
    B, capacity, page_size, slots, row_tiles, parts, scale,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_table,
    S_Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, E4M3: tl.constexpr,
    PAGE: tl.constexpr, PAGE_TILES: tl.constexpr, DEPENDENT: tl.constexpr,
    FIXED: tl.constexpr, SPLITS: tl.constexpr, GAP: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale * q c^T) c[:, :D_V] and lse over the visible keys of B sequences of S_Q tokens.

    q: (B / TOKENS, S_Q * TOKENS, H, D)   kv: (pages, page_size, D)   o: (B * S_Q, H, D_V)   lse: (B * S_Q, H)
    partial_acc: (slots of `division`, row_tiles, BLOCK_M, D_V), partial_stat: the same with 2, float32.
    TOKENS: with indices (B, capacity) each token is a sequence, and TOKENS of them have one length.
    WIDTH + REST cover D.   PAGE: page_size if it is a power of two, else 0.   PAGE_TILES: a key tile lies in one page.
    """
    if DEPENDENT:  # let the second kernel begin when SMs are free; it waits for the end of this one
        tl.extra.cuda.gdc_launch_dependents()
    row_tile, part = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles

    # The sequences of this share
    if FIXED:
        first, last = part // SPLITS, part // SPLITS + 1
    else:
        begin, end, share = line(lengths, B, capacity, parts, TOKENS, GAP, LEAST, BLOCK_B, BLOCK_N)
        share_begin = part * share
        share_end = share_begin + share
        first = tl.sum((end <= share_begin).to(tl.int32))
        last = tl.minimum(tl.sum((begin < share_end).to(tl.int32)), B)

    offs_m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = offs_m < S_Q * H
    token, head = offs_m // H, offs_m % H
    offs_n = tl.arange(0, BLOCK_N)
    for i in tl.range(0, last - first, num_stages=1):
        # The key tiles of this segment
        b = first + i
        keys_end = keys_of(lengths, b, B, capacity, TOKENS)
        if FIXED:
            tiles, each = cut(keys_end, SPLITS, LEAST, BLOCK_N)
            tile_begin = part % SPLITS * each
            tile_end = tl.minimum(tile_begin + each, tiles)
        else:
            tiles = tl.maximum(tl.cdiv(keys_end, BLOCK_N), 1)
            zero = tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, begin, 0)) + GAP
            tile_begin = tl.maximum(share_begin - zero, 0)
            tile_end = tl.minimum(share_end - zero, tiles)
        is_mine = tile_begin < tile_end
        is_whole = (tile_begin == 0) & (tile_end == tiles)

        # Load the queries
        position = keys_end - S_Q + token
        q_token = b * S_Q + token
        q_rows = (q_token // (S_Q * TOKENS)).to(tl.int64) * stride_qb + (q_token % (S_Q * TOKENS)) * stride_qs
        q_rows += head * stride_qh
        live = in_rows & is_mine
        q_tile = _columns(q, q_rows, live, 0, WIDTH, D)  # (BLOCK_M, WIDTH)
        if REST > 0:
            q_rest = _columns(q, q_rows, live, WIDTH, REST, D)  # (BLOCK_M, REST)
        if block_table is not None:
            table = block_table + b.to(tl.int64) * stride_table
        if indices is not None:
            chosen = indices + b.to(tl.int64) * capacity

        # Running softmax in units of log2, in fp32
        m_i = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for tile in tl.range(tile_begin, tile_end):
            keys = tile * BLOCK_N + offs_n
            in_range = keys < keys_end

            # Where the keys of this tile lie; nothing outside of the range is followed or read
            if indices is not None:
                slot = tl.load(chosen + keys, mask=in_range, other=-1)
                in_range = (slot >= 0) & (slot < slots)
                slot = tl.where(in_range, slot, 0)
                if PAGE > 0:
                    page, place = slot // PAGE, slot % PAGE
                else:
                    page, place = slot // page_size, slot % page_size
            elif block_table is None:
                page, place = b, keys
            elif PAGE_TILES:
                start = tile * BLOCK_N
                if PAGE > 0:
                    page, place = tl.load(table + start // PAGE), start % PAGE + offs_n
                else:
                    page, place = tl.load(table + start // page_size), start % page_size + offs_n
            elif PAGE > 0:
                page, place = tl.load(table + keys // PAGE, mask=in_range, other=0), keys % PAGE
            else:
                page, place = tl.load(table + keys // page_size, mask=in_range, other=0), keys % page_size
            row = page.to(tl.int64) * stride_kp + place.to(tl.int64) * stride_ks

            # S = Q C^T
            if PACKED:
                c_tile = _unpacked(kv, row, in_range, q.dtype.element_ty, E4M3)
                rope = (kv + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
                rope_rows = tl.multiple_of(row >> 1, 8)
                c_rest = _columns(rope, rope_rows, in_range, 0, REST, REST).to(q.dtype.element_ty)
            else:
                c_tile = _columns(kv, row, in_range, 0, WIDTH, D)  # (BLOCK_N, WIDTH)
                if REST > 0:
                    c_rest = _columns(kv, row, in_range, WIDTH, REST, D)  # (BLOCK_N, REST)
            s = tl.dot(q_tile, c_tile.T, input_precision="ieee")
            if REST > 0:
                s = tl.dot(q_rest, c_rest.T, s, input_precision="ieee")
            s *= scale * LOG2E
            visible = in_range[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= position[:, None])
            s = tl.where(visible, s, MINUS_INFINITY)

            # Online softmax
            m_new = tl.maximum(m_i, tl.max(s, 1))
            base = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m_i - base)
            l_i = l_i * alpha + tl.sum(p, 1)
            m_i = m_new

            # O += P C
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(c_tile.dtype), c_tile, acc, input_precision="ieee")

        offs_d = tl.arange(0, WIDTH)
        in_columns = (offs_d < D_V)[None, :]
        if is_whole:
            values, row_lse = finish(m_i, l_i, acc, sinks, head, live)
            out_row = q_token.to(tl.int64) * H + head
            tl.store(
                o + out_row[:, None] * D_V + offs_d[None, :], values.to(o.dtype.element_ty),
                mask=live[:, None] & in_columns,
            )  # fmt: skip
            tl.store(lse + out_row, row_lse, mask=live)
        else:
            if FIXED:
                place_of = part
            else:
                place_of = part * 2 + (tile_begin == 0)
            at = (place_of.to(tl.int64) * row_tiles + row_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_acc + at[:, None] * D_V + offs_d[None, :], acc, mask=live[:, None] & in_columns)
            tl.store(partial_stat + at * 2, m_i, mask=live)
            tl.store(partial_stat + at * 2 + 1, l_i, mask=live)
