"""The Triton kernel of groups of rows: from a tile's number to its group, the loop along K, an epilogue that stops
where the group does.

Row limits come from device memory.  What a tile reads behind its group is not stored: rows do not mix in a product.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.engines.tile_triton_kernel import _activate, _add_product, _halves, _load, _multiple, _offsets

NO_SCALES = tl.constexpr(-1)
TOKEN_BLOCK = tl.constexpr(2)


@triton.jit
def _row_limits(group, inside, starts, ends, R, BATCHED: tl.constexpr):
    """First row of groups, and the row behind their last, in 0..R; nothing where not `inside`."""
    last = tl.load(ends + group, mask=inside, other=0)
    if starts is not None:
        first = tl.load(starts + group, mask=inside, other=0)
    elif BATCHED:
        first = last * 0
    else:
        first = tl.load(ends + group - 1, mask=inside & (group > 0), other=0)
    return tl.minimum(tl.maximum(first, 0), R), tl.minimum(tl.maximum(last, 0), R)


@triton.jit
def _row_tiles(group, starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr):
    first, last = _row_limits(group, group < G, starts, ends, R, BATCHED)
    return tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)


@triton.jit
def _all_row_tiles(starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    total = 0
    for some in range(0, G, GROUPS):
        total += tl.sum(_row_tiles(some + tl.arange(0, GROUPS), starts, ends, G, R, BATCHED, BLOCK_M))
    return total


@triton.jit
def _group_of(tile, tiles_n, starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """(the group of a tile, rows of tiles in the groups before): tiles are numbered group by group."""
    group = 0
    before = 0
    seen = 0
    for some in range(0, G, GROUPS):
        groups = some + tl.arange(0, GROUPS)
        tiles = _row_tiles(groups, starts, ends, G, R, BATCHED, BLOCK_M)
        upto = seen + tl.cumsum(tiles, 0)
        passed = (upto * tiles_n <= tile) & (groups < G)
        group += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles, 0))
        seen += tl.sum(tiles)
    return group, before


@triton.jit
def _store_rows(d, value, batch, row, row_end, col, N, stride_db, stride_dm, WIDE: tl.constexpr):
    offs_m = _offsets(value.shape[0], WIDE)[:, None]
    offs_n = tl.arange(0, value.shape[1])[None, :]
    at = d + (batch.to(tl.int64) * stride_db + row.to(tl.int64) * stride_dm + col)
    tl.store(at + (offs_m * stride_dm + offs_n), value, mask=(offs_m < row_end - row) & (offs_n < N - col))


@triton.jit
def _row_scales(scale, batch, row, rows, deep, stride_b, stride_r, stride_k, BLOCK: tl.constexpr):  # -> (BLOCK,)
    offs = tl.arange(0, BLOCK)
    at = scale + (batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_r + deep.to(tl.int64) * stride_k)
    return tl.load(at + tl.minimum(offs, rows - 1) * stride_r)


@triton.jit
def grouped_rows_kernel(
    d, a, b, scale_a, scale_b, starts, ends,  # d: (Ba, R, N_out)   a: (Ba, R, K)   b: (G, K, N)   all by stride
    G, R, N, K, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_sab, stride_sam, stride_sak, stride_sbb, stride_sbn, stride_sbk,  # 0 where one scale serves all
    ACT: tl.constexpr, SCALING: tl.constexpr, BATCHED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_D: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d = act(a rows of group g @ b[g]): as many programs as fit walk over the tiles of all groups."""
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper adds float8 products up in 14 bits; after this many along K they go into a float32 accumulator
    SHORT: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0
    N_out = _multiple(N // GATED, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    stride_db = _multiple(stride_db, VECTOR_D)
    if A_K_MAJOR:
        stride_am = _multiple(stride_am, VECTOR_A)
        stride_ak = 1
    else:
        stride_ak = _multiple(stride_ak, VECTOR_A)
        stride_am = 1
    if B_K_MAJOR:
        K = _multiple(K, VECTOR_B)
        stride_bn = _multiple(stride_bn, VECTOR_B)
        stride_bk = 1
    else:
        N = _multiple(N, VECTOR_B)
        stride_bk = _multiple(stride_bk, VECTOR_B)
        stride_bn = 1
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_B)
    CLAMP_A: tl.constexpr = A_K_MAJOR or VECTOR_A == 1
    CLAMP_B: tl.constexpr = B_K_MAJOR or VECTOR_B == 1
    if DESCRIPTORS:
        batches = G if BATCHED else 1
        if A_K_MAJOR:
            a_desc = tl.make_tensor_descriptor(a, [batches, R, K], [stride_ab, stride_am, 1], [1, BLOCK_M, BLOCK_K])
        else:
            a_desc = tl.make_tensor_descriptor(a, [batches, K, R], [stride_ab, stride_ak, 1], [1, BLOCK_K, BLOCK_M])
        if B_K_MAJOR:
            b_desc = tl.make_tensor_descriptor(b, [G, N, K], [stride_bb, stride_bn, 1], [1, BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b, [G, K, N], [stride_bb, stride_bk, 1], [1, BLOCK_K, BLOCK_N])
        d_desc = tl.make_tensor_descriptor(d, [batches, R, N_out], [stride_db, stride_dm, 1], [1, BLOCK_M, WIDTH])
    tiles_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    tiles = _all_row_tiles(starts, ends, G, R, BATCHED, BLOCK_M, GROUPS) * tiles_n
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group, before = _group_of(tile, tiles_n, starts, ends, G, R, BATCHED, BLOCK_M, GROUPS)
        first, last = _row_limits(group, group < G, starts, ends, R, BATCHED)
        batch = group if BATCHED else group * 0
        # Bands of BAND tile rows of a group, walked column by column
        place = tile - before * tiles_n
        band = place // (BAND * tiles_n)
        height = tl.minimum(tl.cdiv(last - first, BLOCK_M) - band * BAND, BAND)
        inside = place % (BAND * tiles_n)
        row = first + (band * BAND + inside % height) * BLOCK_M
        col = inside // height * BLOCK_N
        at_a = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am)
        at_b = b + (group.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn)
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(blocks):
            start = block * BLOCK_K
            if DESCRIPTORS:
                if A_K_MAJOR:
                    x = a_desc.load([batch, row, start]).reshape(BLOCK_M, BLOCK_K)
                else:
                    x = a_desc.load([batch, start, row]).reshape(BLOCK_K, BLOCK_M).T
                if B_K_MAJOR:
                    y = b_desc.load([group, col, start]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    y = b_desc.load([group, start, col]).reshape(BLOCK_K, BLOCK_N)
            else:
                in_a = at_a + start.to(tl.int64) * stride_ak
                in_b = at_b + start.to(tl.int64) * stride_bk
                x = _load(in_a, offs_m, offs_k[None, :], last - row, K - start, stride_am, stride_ak, CLAMP_A, EVEN_K)
                y = _load(in_b, offs_n, offs_k[:, None], N - col, K - start, stride_bn, stride_bk, CLAMP_B, EVEN_K)
            if SCALING >= TOKEN_BLOCK:
                part = tl.dot(x, y)  # 128 of K: as far as the tensor cores' own sum may go
                deep = start // 128
                left = _row_scales(
                    scale_a, batch, row, last - row, deep, stride_sab, stride_sam, stride_sak, BLOCK_M
                )  # fmt: skip
                if SCALING == TOKEN_BLOCK:  # 128 columns share a scale, and a tile lies inside of them
                    at = group.to(tl.int64) * stride_sbb + (col // 128).to(tl.int64) * stride_sbn
                    acc += part * (left * tl.load(scale_b + at + deep.to(tl.int64) * stride_sbk))[:, None]
                else:
                    right = _row_scales(
                        scale_b, group, col, N - col, deep, stride_sbb, stride_sbn, stride_sbk, BLOCK_N
                    )  # fmt: skip
                    acc += part * left[:, None] * right[None, :]
            else:
                acc = _add_product(acc, x, y, SHORT)
        if SCALING != NO_SCALES and SCALING < TOKEN_BLOCK:  # of whole rows, or of everything
            left = _row_scales(scale_a, batch, row, last - row, group * 0, stride_sab, stride_sam, 0, BLOCK_M)
            right = _row_scales(scale_b, group, col, N - col, group * 0, stride_sbb, stride_sbn, 0, BLOCK_N)
            acc = acc * left[:, None] * right[None, :]
        parts = (acc,)
        if PARTS >= 2:
            parts = _halves(acc)
        if PARTS >= 4:
            left_half, right_half = parts
            parts = _halves(left_half) + _halves(right_half)
        for i in tl.static_range(PARTS):
            here = (col + i * (BLOCK_N // PARTS)) // GATED
            value = _activate(parts[i], ACT, PRECISE).to(d.dtype.element_ty)
            if DESCRIPTORS:
                if row + BLOCK_M <= last:
                    d_desc.store([batch, row, here], value.reshape(1, BLOCK_M, WIDTH))
                else:
                    _store_rows(d, value, batch, row, last, here, N_out, stride_db, stride_dm, WIDE)
            else:
                _store_rows(d, value, batch, row, last, here, N_out, stride_db, stride_dm, WIDE)
