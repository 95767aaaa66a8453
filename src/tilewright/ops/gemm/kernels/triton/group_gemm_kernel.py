"""The Triton kernels of grouped GEMM with different shapes: one writes the table of problems, one multiplies."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import _dot_acc, _load, _multiple, _offsets, _parts_of, _store

# Columns of the table, int64: addresses of A and B, offset of the result in D in elements, sizes, strides
FIELDS = tl.constexpr(10)
A, B, D, SIZE_M, SIZE_N, SIZE_K, STRIDE_AM, STRIDE_AK, STRIDE_BK, STRIDE_BN = map(tl.constexpr, range(10))


_NUMBERS = ("index", "gap", "d_offset", "M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("a", "b", "d"))
def problem_kernel(
    table, index, d, gap, a, b, d_offset, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Writes row `index` of the table.  The values are kernel parameters, so that a CUDA graph records them.

    Fills the gap between this result and the next, fewer than UNIT elements, with zeros: all bits of D are defined.
    """
    gap_offs = d_offset + M.to(tl.int64) * N + tl.arange(0, UNIT)
    tl.store(d + gap_offs, tl.zeros((UNIT,), d.dtype.element_ty), mask=tl.arange(0, UNIT) < gap)
    entry = table + index * FIELDS
    tl.store(entry + A, a.to(tl.int64))
    tl.store(entry + B, b.to(tl.int64))
    tl.store(entry + D, d_offset)
    tl.store(entry + SIZE_M, M)
    tl.store(entry + SIZE_N, N)
    tl.store(entry + SIZE_K, K)
    tl.store(entry + STRIDE_AM, stride_am)
    tl.store(entry + STRIDE_AK, stride_ak)
    tl.store(entry + STRIDE_BK, stride_bk)
    tl.store(entry + STRIDE_BN, stride_bn)


@triton.jit
def _tiles(table, problem, G, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    mask = problem < G
    m = tl.load(table + problem * FIELDS + SIZE_M, mask=mask, other=0).to(tl.int32)
    n = tl.load(table + problem * FIELDS + SIZE_N, mask=mask, other=0).to(tl.int32)
    return tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)


@triton.jit
def group_gemm_kernel(
    d, table, like, G,  # d: all results   table: (G, FIELDS)   like: any operand, for its type
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d = a @ b for every problem, tile by tile, in the order of the table.

    A_UNIT, B_UNIT: the dimension of unit stride in every problem, "K" or "MN"; "" if problems differ.   VECTOR:
    elements in 16 bytes if every address and pitch is a multiple of these, else 1.
    """
    # Count the tiles of all problems
    num_tiles = 0
    for first_problem in range(0, G, GROUPS):
        num_tiles += tl.sum(_tiles(table, first_problem + tl.arange(0, GROUPS), G, BLOCK_M, BLOCK_N))

    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Find the problem of the tile
        problem = 0
        tiles_before = 0
        tiles_seen = 0
        for first_problem in range(0, G, GROUPS):
            problems = first_problem + tl.arange(0, GROUPS)
            tiles = _tiles(table, problems, G, BLOCK_M, BLOCK_N)
            is_earlier = (tiles_seen + tl.cumsum(tiles, 0) <= tile) & (problems < G)
            problem += tl.sum(is_earlier.to(tl.int32))
            tiles_before += tl.sum(tl.where(is_earlier, tiles, 0))
            tiles_seen += tl.sum(tiles)

        # Load the problem, and tell the compiler what is a multiple of 16 bytes
        entry = table + problem * FIELDS
        a = tl.load(entry + A).to(like.dtype)
        b = tl.load(entry + B).to(like.dtype)
        M = tl.load(entry + SIZE_M).to(tl.int32)
        N = tl.load(entry + SIZE_N).to(tl.int32)
        K = tl.load(entry + SIZE_K).to(tl.int32)
        stride_am = tl.load(entry + STRIDE_AM)
        stride_ak = tl.load(entry + STRIDE_AK)
        stride_bk = tl.load(entry + STRIDE_BK)
        stride_bn = tl.load(entry + STRIDE_BN)
        if VECTOR > 1:
            a = tl.multiple_of(a, 16)
            b = tl.multiple_of(b, 16)
            if A_UNIT == "K" or B_UNIT == "K":
                K = _multiple(K, VECTOR)
            if A_UNIT == "MN":
                M = _multiple(M, VECTOR)
            if B_UNIT == "MN":
                N = _multiple(N, VECTOR)
        if A_UNIT == "K":
            stride_am = _multiple(stride_am, VECTOR)
            stride_ak = 1
        elif A_UNIT == "MN":
            stride_ak = _multiple(stride_ak, VECTOR)
            stride_am = 1
        if B_UNIT == "K":
            stride_bn = _multiple(stride_bn, VECTOR)
            stride_bk = 1
        elif B_UNIT == "MN":
            stride_bk = _multiple(stride_bk, VECTOR)
            stride_bn = 1
        if not WIDE:
            stride_am, stride_ak, stride_bk, stride_bn = _narrow(stride_am, stride_ak, stride_bk, stride_bn)
        CLAMP_A: tl.constexpr = A_UNIT != "MN" or VECTOR == 1
        CLAMP_B: tl.constexpr = B_UNIT != "MN" or VECTOR == 1

        # Find the tile in grouped order: GROUP_M tile rows at a time, column by column
        tiles_n = tl.cdiv(N, BLOCK_N)
        tile_index = tile - tiles_before
        m_group = tile_index // (GROUP_M * tiles_n)
        group_size_m = tl.minimum(tl.cdiv(M, BLOCK_M) - m_group * GROUP_M, GROUP_M)
        index_in_group = tile_index % (GROUP_M * tiles_n)
        row = (m_group * GROUP_M + index_in_group % group_size_m) * BLOCK_M
        col = index_in_group // group_size_m * BLOCK_N
        a_ptr = a + row.to(tl.int64) * stride_am
        b_ptr = b + col.to(tl.int64) * stride_bn
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)

        # Accumulate along K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(tl.cdiv(K, BLOCK_K)):
            start = k_block * BLOCK_K
            a_k_ptr = a_ptr + start.to(tl.int64) * stride_ak
            b_k_ptr = b_ptr + start.to(tl.int64) * stride_bk
            x = _load(a_k_ptr, offs_m, offs_k[None, :], M - row, K - start, stride_am, stride_ak, CLAMP_A, False)
            y = _load(b_k_ptr, offs_n, offs_k[:, None], N - col, K - start, stride_bn, stride_bk, CLAMP_B, False)
            acc = _dot_acc(acc, x, y, 0)

        # Epilogue, in parts of the columns to save registers
        parts = _parts_of(acc, PARTS)
        d_ptr = d + tl.load(entry + D)
        for i in tl.static_range(PARTS):
            value = parts[i].to(d.dtype.element_ty)
            _store(d_ptr, value, row * 0, row, col + i * (BLOCK_N // PARTS), M, N, 0, N.to(tl.int64), WIDE)


@triton.jit
def _narrow(a, b, c, d):
    return _as_int32(a), _as_int32(b), _as_int32(c), _as_int32(d)


@triton.jit
def _as_int32(x):
    return x.to(tl.int32)
