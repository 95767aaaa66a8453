"""The kernel of latent attention over a KV cache: a program computes its share of the key tiles, for one row tile.

The rows of a tile are tokens times heads: all heads read the same keys.  A tile of tokens is loaded once and is the
operand of both products, S = Q C^T over all columns and O += P C over the first ones.  It is loaded in parts, so that
few addresses serve many columns: one or two of WIDTH columns, and the REST, the rotated part.  An online softmax runs
over key tiles.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.latent.division import cut, keys_of, line
from tilewright.ops.attention.kernels.triton.paged.attend import normaliser
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
def _latents(base, row, in_range, FIRST: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, E4M3: tl.constexpr):
    """`_columns` of the latents of packed tokens in DTYPE, each rounded once."""
    group, column = tl.arange(0, WIDTH // 128), tl.arange(0, 128)
    codes = tl.load(
        base + FIRST + row[:, None, None] + (group * 128)[None, :, None] + column[None, None, :],
        mask=in_range[:, None, None], other=0,
    )  # fmt: skip
    if E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        numbers = decode(codes)
    words = (base + SCALES_AT).to(tl.pointer_type(tl.float32)) + FIRST // 128
    scales = tl.load(words + tl.multiple_of(row >> 2, 4)[:, None] + group[None, :], mask=in_range[:, None], other=0.0)
    return tl.reshape((numbers * scales[:, :, None]).to(DTYPE), (row.shape[0], WIDTH))


@triton.jit
def _ropes(base, row, in_range, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """The rotated parts of packed tokens in DTYPE."""
    pairs = (base + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
    return _columns(pairs, tl.multiple_of(row >> 1, 8), in_range, 0, WIDTH, WIDTH).to(DTYPE)


@triton.jit
def _put(base, row, live, tile, FIRST: tl.constexpr, D_V: tl.constexpr):
    """Store columns FIRST .. FIRST + WIDTH of rows (rows, D_V)."""
    offs_d = FIRST + tl.arange(0, tile.shape[1])
    pointers = base + row[:, None] * D_V + offs_d[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=live[:, None] & (offs_d < D_V)[None, :])


@triton.jit
def _rows(row_tile, at_least_0, BLOCK_M: tl.constexpr):
    """The rows of a tile.  A number that the compiler does not know to be positive keeps them, and all that is made of
    them, from being computed before the loops, where they would take registers of the sums.
    """
    return (row_tile + tl.minimum(at_least_0, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def attend_kernel(
    q, o, lse, partial_acc, partial_stat, kv, lengths, block_table, indices, sinks,
    B, tokens_each, capacity, page_size, slots, row_tiles, parts, scale,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_table,
    S_Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, TWO: tl.constexpr, REST: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, E4M3: tl.constexpr,
    PAGE: tl.constexpr, PAGE_TILES: tl.constexpr, DEPENDENT: tl.constexpr,
    FIXED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale * q c^T) c[:, :D_V] and lse over the visible keys of B sequences of S_Q tokens.

    q: (B / tokens_each, S_Q * tokens_each, H, D)   kv: (pages, page_size, D)   o: (B * S_Q, H, D_V)   lse: (B * S_Q, H)
    partial_acc: (slots of `division`, row_tiles, BLOCK_M, D_V), partial_stat: the same with 2, float32.
    tokens_each: with indices (B, capacity) each token is a sequence, and so many of them have one length.
    WIDTH, another if TWO, and REST cover D.   PAGE: page_size if it is a power of two, else 0.   PAGE_TILES: a key tile
    lies in one page.
    """
    if DEPENDENT:  # let the second kernel begin when SMs are free; it waits for the end of this one
        tl.extra.cuda.gdc_launch_dependents()
    LEFT: tl.constexpr = 2 * WIDTH if TWO else WIDTH  # where the rest begins
    DTYPE: tl.constexpr = q.dtype.element_ty
    row_tile, part = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles

    # The sequences of this share
    if FIXED:
        first, last = part // SPLITS, part // SPLITS + 1
    else:
        begin, end, share = line(lengths, B, tokens_each, capacity, parts, LEAST, BLOCK_B, BLOCK_N)
        share_begin = part * share
        share_end = share_begin + share
        first = tl.sum((end <= share_begin).to(tl.int32))
        last = tl.minimum(tl.sum((begin < share_end).to(tl.int32)), B)

    for i in tl.range(0, last - first, num_stages=1, disable_licm=True):
        # The key tiles of this segment
        b = first + i
        keys_end = keys_of(lengths, b, B, tokens_each, capacity)
        if FIXED:
            tiles, each = cut(keys_end, SPLITS, LEAST, BLOCK_N)
            tile_begin = part % SPLITS * each
            tile_end = tl.minimum(tile_begin + each, tiles)
        else:
            tiles = tl.maximum(tl.cdiv(keys_end, BLOCK_N), 1)
            zero = tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, begin, 0))
            tile_begin = tl.maximum(share_begin - zero, 0)
            tile_end = tl.minimum(share_end - zero, tiles)
        is_mine = tile_begin < tile_end
        is_whole = (tile_begin == 0) & (tile_end == tiles)

        # Load the queries
        offs_m = _rows(row_tile, b, BLOCK_M)
        token, head = offs_m // H, offs_m % H
        offs_n = tl.arange(0, BLOCK_N)
        position = keys_end - S_Q + token
        if indices is None:
            q_rows = b.to(tl.int64) * stride_qb + token * stride_qs + head * stride_qh
        else:
            q_rows = (b // tokens_each).to(tl.int64) * stride_qb + b % tokens_each * stride_qs + head * stride_qh
        live = (offs_m < S_Q * H) & is_mine
        q_tile = _columns(q, q_rows, live, 0, WIDTH, D)  # (BLOCK_M, WIDTH)
        if TWO:
            q_next = _columns(q, q_rows, live, WIDTH, WIDTH, D)
        if REST > 0:
            q_rest = _columns(q, q_rows, live, LEFT, REST, D)  # (BLOCK_M, REST)
        if block_table is not None:
            table = block_table + b.to(tl.int64) * stride_table
        if indices is not None:
            chosen = indices + b.to(tl.int64) * capacity

        # Running softmax in units of log2, in fp32
        m_i = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        if TWO:
            acc_next = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for tile in tl.range(tile_begin, tile_end, disable_licm=True):
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
                c_tile = _latents(kv, row, in_range, 0, WIDTH, DTYPE, E4M3)
            else:
                c_tile = _columns(kv, row, in_range, 0, WIDTH, D)  # (BLOCK_N, WIDTH)
            s = tl.dot(q_tile, c_tile.T, input_precision="ieee")
            if TWO:
                if PACKED:
                    c_next = _latents(kv, row, in_range, WIDTH, WIDTH, DTYPE, E4M3)
                else:
                    c_next = _columns(kv, row, in_range, WIDTH, WIDTH, D)
                s = tl.dot(q_next, c_next.T, s, input_precision="ieee")
            if REST > 0:
                if PACKED:
                    c_rest = _ropes(kv, row, in_range, REST, DTYPE)
                else:
                    c_rest = _columns(kv, row, in_range, LEFT, REST, D)  # (BLOCK_N, REST)
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
            p = p.to(DTYPE)
            acc = tl.dot(p, c_tile, acc * alpha[:, None], input_precision="ieee")
            if TWO:
                acc_next = tl.dot(p, c_next, acc_next * alpha[:, None], input_precision="ieee")

        offs_m = _rows(row_tile, keys_end, BLOCK_M)
        live = (offs_m < S_Q * H) & is_mine
        if is_whole:
            factor, row_lse = normaliser(m_i, l_i, sinks, offs_m % H, live)
            out_row = b.to(tl.int64) * (S_Q * H) + offs_m
            _put(o, out_row, live, acc * factor[:, None], 0, D_V)
            if TWO:
                _put(o, out_row, live, acc_next * factor[:, None], WIDTH, D_V)
            tl.store(lse + out_row, row_lse, mask=live)
        else:
            if FIXED:
                place_of = part
            else:
                place_of = part * 2 + (tile_begin == 0)
            partial_row = (place_of.to(tl.int64) * row_tiles + row_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
            _put(partial_acc, partial_row, live, acc, 0, D_V)
            if TWO:
                _put(partial_acc, partial_row, live, acc_next, WIDTH, D_V)
            tl.store(partial_stat + partial_row * 2, m_i, mask=live)
            tl.store(partial_stat + partial_row * 2 + 1, l_i, mask=live)
