"""The Triton kernel of symmetric products: tiles on and under the diagonal, each stored twice."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import _dot_acc, _load, _multiple, _offsets, _store


@triton.jit
def _triangle_row(index):
    """The row of an element of a triangle whose elements are counted row by row: row (row + 1) / 2 <= index."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)  # the root may be off by a rounding
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@triton.jit
def _tile_coordinates(index, tiles, GROUP: tl.constexpr):
    """-> tile row, tile column <= tile row.  GROUP tile rows at a time: their square columns one by one, then the
    triangle that ends them.
    """
    first = _triangle_row(index) // GROUP * GROUP
    rows = tl.minimum(tiles - first, GROUP)
    place = index - first * (first + 1) // 2
    corner = tl.maximum(place - first * rows, 0)
    corner_row = _triangle_row(corner)
    corner_col = corner - corner_row * (corner_row + 1) // 2
    square = place < first * rows
    return first + tl.where(square, place % rows, corner_row), tl.where(square, place // rows, first + corner_col)


@triton.jit
def symmetric_kernel(
    d, a, b, c, alpha, beta,  # d, c: (B, M, M)   a, b: (B, M, K)   contiguous along the last
    B, M, K, stride_db, stride_dm, stride_ab, stride_am, stride_bb, stride_bm, stride_cb, stride_cm,
    DESCRIPTORS: tl.constexpr, VECTOR_A: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the lower triangle of d = alpha * a @ b^T + beta * c, tile by tile, and mirrors it."""
    # Tell the compiler what is a multiple of 16 bytes
    K = _multiple(K, VECTOR_A)
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_am = _multiple(stride_am, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_A)
    stride_bm = _multiple(stride_bm, VECTOR_A)
    stride_db = _multiple(stride_db, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    M_d = _multiple(M, VECTOR_D)
    if DESCRIPTORS:
        a_desc = tl.make_tensor_descriptor(a, [B, M, K], [stride_ab, stride_am, 1], [1, BLOCK, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [B, M, K], [stride_bb, stride_bm, 1], [1, BLOCK, BLOCK_K])
        d_desc = tl.make_tensor_descriptor(d, [B, M, M_d], [stride_db, stride_dm, 1], [1, BLOCK, BLOCK])
    tiles = tl.cdiv(M, BLOCK)
    tiles_per_product = tiles * (tiles + 1) // 2

    for tile in tl.range(tl.program_id(0), B * tiles_per_product, tl.num_programs(0), flatten=True):
        batch = tile // tiles_per_product
        tile_m, tile_n = _tile_coordinates(tile % tiles_per_product, tiles, GROUP)
        row = tile_m * BLOCK
        col = tile_n * BLOCK

        # Accumulate along K
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k_block in range(tl.cdiv(K, BLOCK_K)):
            start = k_block * BLOCK_K
            if DESCRIPTORS:
                x = a_desc.load([batch, row, start]).reshape(BLOCK, BLOCK_K)
                y = b_desc.load([batch, col, start]).reshape(BLOCK, BLOCK_K).T
            else:
                a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am + start)
                b_ptr = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bm + start)
                offs = _offsets(BLOCK, WIDE)
                offs_k = tl.arange(0, BLOCK_K)
                x = _load(a_ptr, offs[:, None], offs_k[None, :], M - row, K - start, stride_am, 1, True, EVEN_K)
                y = _load(b_ptr, offs[None, :], offs_k[:, None], M - col, K - start, stride_bm, 1, True, EVEN_K)
            acc = _dot_acc(acc, x, y, 0)

        # Scale, add c, and mirror the diagonal tile in itself
        value = acc * alpha
        offs_m = _offsets(BLOCK, WIDE)[:, None]
        offs_n = _offsets(BLOCK, WIDE)[None, :]
        if c is not None:
            stride_cb = _multiple(stride_cb, VECTOR_C)
            stride_cm = _multiple(stride_cm, VECTOR_C)
            c_ptr = c + (batch.to(tl.int64) * stride_cb + row.to(tl.int64) * stride_cm + col)
            mask = (offs_m < M - row) & (offs_n < _multiple(M, VECTOR_C) - col)
            value += beta * tl.load(c_ptr + (offs_m * stride_cm + offs_n), mask=mask, other=0.0).to(tl.float32)
        value = value.to(d.dtype.element_ty)
        mirror = tl.trans(value)
        off_diagonal = tile_m > tile_n
        lower = tl.where(off_diagonal | (offs_m >= offs_n), value, mirror)
        upper = tl.where(off_diagonal | (offs_m <= offs_n), mirror, value)  # of the diagonal the same as lower

        if DESCRIPTORS:
            d_desc.store([batch, row, col], lower.reshape(1, BLOCK, BLOCK))
            d_desc.store([batch, col, row], upper.reshape(1, BLOCK, BLOCK))
        else:
            _store(d, lower, batch, row, col, M, M_d, stride_db, stride_dm, WIDE)
            _store(d, upper, batch, col, row, M, M_d, stride_db, stride_dm, WIDE)
