"""The Triton kernel of groups along K: whole blocks of K first, then what is left of the group, masked by its end."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.engines.tile_triton_kernel import (
    _add_product,
    _finish,
    _halves,
    _load,
    _multiple,
    _offsets,
    _store,
)
from tilewright.ops.grouped.engines.rows_triton_kernel import NO_SCALES, _row_scales


@triton.jit
def k_grouped_kernel(
    d, a, b, scale_a, scale_b, c, ends,  # d, c: (G, M, N)   a: (M, T)   b: (T, N)   all by stride   scales: (., T/128)
    G, M, N, T, stride_dg, stride_dm, stride_am, stride_ak, stride_bk, stride_bn, stride_cg, stride_cm, stride_cn,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    SCALING: tl.constexpr, DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    WIDE: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d[g] = a[:, group g] @ b[group g] + c[g], tile by tile."""
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper adds float8 products up in 14 bits; after this many along K they go into a float32 accumulator
    SHORT: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0
    stride_dm = _multiple(stride_dm, VECTOR_D)
    stride_dg = _multiple(stride_dg, VECTOR_D)
    N_d = _multiple(N, VECTOR_D)
    if A_K_MAJOR:
        stride_am = _multiple(stride_am, VECTOR_A)
        stride_ak = 1
    else:
        stride_ak = _multiple(stride_ak, VECTOR_A)
        stride_am = 1
    if B_K_MAJOR:
        stride_bn = _multiple(stride_bn, VECTOR_B)
        stride_bk = 1
    else:
        stride_bk = _multiple(stride_bk, VECTOR_B)
        stride_bn = 1
    # Neighbours along a row are vectors where M or N tells so; a mask along K never cuts one of those
    if not A_K_MAJOR:
        M = _multiple(M, VECTOR_A)
    if not B_K_MAJOR:
        N = _multiple(N, VECTOR_B)
    CLAMP_A: tl.constexpr = A_K_MAJOR or VECTOR_A == 1
    CLAMP_B: tl.constexpr = B_K_MAJOR or VECTOR_B == 1
    if DESCRIPTORS:
        if A_K_MAJOR:
            a_desc = tl.make_tensor_descriptor(a, [M, T], [stride_am, 1], [BLOCK_M, BLOCK_K])
        else:
            a_desc = tl.make_tensor_descriptor(a, [T, M], [stride_ak, 1], [BLOCK_K, BLOCK_M])
        if B_K_MAJOR:
            b_desc = tl.make_tensor_descriptor(b, [N, T], [stride_bn, 1], [BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b, [T, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
        d_desc = tl.make_tensor_descriptor(d, [G, M, N_d], [stride_dg, stride_dm, 1], [1, BLOCK_M, WIDTH])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), G * tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (tiles_m * tiles_n)
        place = tile % (tiles_m * tiles_n)
        band = place // (BAND * tiles_n)
        height = tl.minimum(tiles_m - band * BAND, BAND)
        inside = place % (BAND * tiles_n)
        row = (band * BAND + inside % height) * BLOCK_M
        col = inside // height * BLOCK_N
        first = tl.load(ends + group - 1, mask=group > 0, other=0)
        first = tl.minimum(tl.maximum(first, 0), T)
        last = tl.minimum(tl.maximum(tl.load(ends + group), first), T)
        whole = (last - first) // BLOCK_K
        at_a = a + row.to(tl.int64) * stride_am
        at_b = b + col.to(tl.int64) * stride_bn
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(whole):
            start = first + block * BLOCK_K
            if DESCRIPTORS:
                if A_K_MAJOR:
                    x = a_desc.load([row, start])
                else:
                    x = a_desc.load([start, row]).T
                if B_K_MAJOR:
                    y = b_desc.load([col, start]).T
                else:
                    y = b_desc.load([start, col])
            else:
                in_a = at_a + start.to(tl.int64) * stride_ak
                in_b = at_b + start.to(tl.int64) * stride_bk
                x = _load(in_a, offs_m, offs_k[None, :], M - row, BLOCK_K, stride_am, stride_ak, CLAMP_A, True)
                y = _load(in_b, offs_n, offs_k[:, None], N - col, BLOCK_K, stride_bn, stride_bk, CLAMP_B, True)
            if SCALING == NO_SCALES:
                acc = _add_product(acc, x, y, SHORT)
            else:
                part = tl.dot(x, y)  # 128 of K: as far as the tensor cores' own sum may go
                at = start // 128
                left = _row_scales(scale_a, at * 0, row, M - row, at, 0, stride_sam, stride_sak, BLOCK_M)
                right = _row_scales(scale_b, at * 0, col, N - col, at, 0, stride_sbn, stride_sbk, BLOCK_N)
                acc += part * left[:, None] * right[None, :]
        if SCALING == NO_SCALES:  # groups that share a scale along K end with it
            start = first + whole * BLOCK_K
            if start < last:
                in_a = at_a + start.to(tl.int64) * stride_ak
                in_b = at_b + start.to(tl.int64) * stride_bk
                left_k = last - start
                x = _load(in_a, offs_m, offs_k[None, :], M - row, left_k, stride_am, stride_ak, CLAMP_A, False)
                y = _load(in_b, offs_n, offs_k[:, None], N - col, left_k, stride_bn, stride_bk, CLAMP_B, False)
                acc = _add_product(acc, x, y, SHORT)
        parts = (acc,)
        if PARTS >= 2:
            parts = _halves(acc)
        if PARTS >= 4:
            left_half, right_half = parts
            parts = _halves(left_half) + _halves(right_half)
        for i in tl.static_range(PARTS):
            here = col + i * WIDTH
            value = _finish(
                parts[i], 1.0, None, c, group, row, here, M, N, N_d,
                0, stride_cg, stride_cm, stride_cn, VECTOR_C, "", PRECISE, WIDE,
            ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([group, row, here], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, group, row, here, M, N_d, stride_dg, stride_dm, WIDE)
