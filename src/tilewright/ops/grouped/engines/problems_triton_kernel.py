"""The Triton kernels of products of different shapes: one writes the table of problems, one multiplies."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.engines.tile_triton_kernel import _add_product, _halves, _load, _multiple, _offsets, _store

# Columns of the table, of int64: addresses of A and B, elements of D before the result, sizes, strides
FIELDS = tl.constexpr(10)
A, B, D, SIZE_M, SIZE_N, SIZE_K, STRIDE_AM, STRIDE_AK, STRIDE_BK, STRIDE_BN = map(tl.constexpr, range(10))


_NUMBERS = ("index", "gap", "at", "M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("a", "b", "d"))
def problem_kernel(
    table, index, d, gap, a, b, at, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Row `index` of the table: what the host knows travels in the parameters of a launch, which a graph keeps.

    Zeros go into the gap of fewer than UNIT elements between this result and the next: all bits of D are defined.
    """
    behind = at + M.to(tl.int64) * N + tl.arange(0, UNIT)
    tl.store(d + behind, tl.zeros((UNIT,), d.dtype.element_ty), mask=tl.arange(0, UNIT) < gap)
    to = table + index * FIELDS
    tl.store(to + A, a.to(tl.int64))
    tl.store(to + B, b.to(tl.int64))
    tl.store(to + D, at)
    tl.store(to + SIZE_M, M)
    tl.store(to + SIZE_N, N)
    tl.store(to + SIZE_K, K)
    tl.store(to + STRIDE_AM, stride_am)
    tl.store(to + STRIDE_AK, stride_ak)
    tl.store(to + STRIDE_BK, stride_bk)
    tl.store(to + STRIDE_BN, stride_bn)


@triton.jit
def _tiles(table, problem, G, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    inside = problem < G
    m = tl.load(table + problem * FIELDS + SIZE_M, mask=inside, other=0).to(tl.int32)
    n = tl.load(table + problem * FIELDS + SIZE_N, mask=inside, other=0).to(tl.int32)
    return tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)


@triton.jit
def group_gemm_kernel(
    d, table, like, G,  # d: all results   table: (G, FIELDS)   like: any operand, for its type
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles of all products in the order of the table.

    A_UNIT, B_UNIT: the dimension of unit stride in every problem, "K" or "MN"; "" where they differ.   VECTOR:
    elements of 16 bytes where every address and pitch is a multiple of these, else 1.
    """
    total = 0
    for some in range(0, G, GROUPS):
        total += tl.sum(_tiles(table, some + tl.arange(0, GROUPS), G, BLOCK_M, BLOCK_N))
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        problem = 0
        before = 0
        seen = 0
        for some in range(0, G, GROUPS):
            problems = some + tl.arange(0, GROUPS)
            tiles = _tiles(table, problems, G, BLOCK_M, BLOCK_N)
            passed = (seen + tl.cumsum(tiles, 0) <= tile) & (problems < G)
            problem += tl.sum(passed.to(tl.int32))
            before += tl.sum(tl.where(passed, tiles, 0))
            seen += tl.sum(tiles)
        row_of = table + problem * FIELDS
        a = tl.load(row_of + A).to(like.dtype)
        b = tl.load(row_of + B).to(like.dtype)
        M = tl.load(row_of + SIZE_M).to(tl.int32)
        N = tl.load(row_of + SIZE_N).to(tl.int32)
        K = tl.load(row_of + SIZE_K).to(tl.int32)
        stride_am = tl.load(row_of + STRIDE_AM)
        stride_ak = tl.load(row_of + STRIDE_AK)
        stride_bk = tl.load(row_of + STRIDE_BK)
        stride_bn = tl.load(row_of + STRIDE_BN)
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
        tiles_n = tl.cdiv(N, BLOCK_N)
        place = tile - before
        band = place // (BAND * tiles_n)
        height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * BAND, BAND)
        inside = place % (BAND * tiles_n)
        row = (band * BAND + inside % height) * BLOCK_M
        col = inside // height * BLOCK_N
        at_a = a + row.to(tl.int64) * stride_am
        at_b = b + col.to(tl.int64) * stride_bn
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(tl.cdiv(K, BLOCK_K)):
            start = block * BLOCK_K
            in_a = at_a + start.to(tl.int64) * stride_ak
            in_b = at_b + start.to(tl.int64) * stride_bk
            x = _load(in_a, offs_m, offs_k[None, :], M - row, K - start, stride_am, stride_ak, CLAMP_A, False)
            y = _load(in_b, offs_n, offs_k[:, None], N - col, K - start, stride_bn, stride_bk, CLAMP_B, False)
            acc = _add_product(acc, x, y, 0)
        parts = (acc,)
        if PARTS >= 2:
            parts = _halves(acc)
        here = d + tl.load(row_of + D)
        for i in tl.static_range(PARTS):
            value = parts[i].to(d.dtype.element_ty)
            _store(here, value, row * 0, row, col + i * (BLOCK_N // PARTS), M, N, 0, N.to(tl.int64), WIDE)


@triton.jit
def _narrow(a, b, c, d):
    return _as_int32(a), _as_int32(b), _as_int32(c), _as_int32(d)


@triton.jit
def _as_int32(x):
    return x.to(tl.int32)
