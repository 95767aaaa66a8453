"""The Triton kernel of groups along K: full blocks of K first, then the rest of the group, masked by its end."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import (
    _dot_acc,
    _epilogue,
    _load,
    _multiple,
    _offsets,
    _parts_of,
    _store,
)
from tilewright.ops.gemm.kernels.triton.grouped_rows_kernel import NO_SCALES, _row_scales


@triton.jit
def k_grouped_kernel(
    d, a, b, scale_a, scale_b, c, ends,  # d, c: (G, M, N)   a: (M, T)   b: (T, N)   all by stride   scales: (., T/128)
    G, M, N, T, stride_dg, stride_dm, stride_am, stride_ak, stride_bk, stride_bn, stride_cg, stride_cm, stride_cn,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    SCALING: tl.constexpr, DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    WIDE: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d[g] = a[:, group g] @ b[group g] + c[g], tile by tile."""
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper accumulates float8 products in 14 bits; after this many along K they are added to a float32 accumulator
    MAX_IMPRECISE: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0

    # Tell the compiler what is a multiple of 16 bytes
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
    # Rows are read as vectors if M or N is a known multiple; a mask along K never cuts such a vector
    if not A_K_MAJOR:
        M = _multiple(M, VECTOR_A)
    if not B_K_MAJOR:
        N = _multiple(N, VECTOR_B)
    CLAMP_A: tl.constexpr = A_K_MAJOR or VECTOR_A == 1
    CLAMP_B: tl.constexpr = B_K_MAJOR or VECTOR_B == 1

    # Describe operands and result to TMA
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
        # Find the group, and the tile in grouped order: GROUP_M tile rows at a time, column by column
        group = tile // (tiles_m * tiles_n)
        tile_index = tile % (tiles_m * tiles_n)
        m_group = tile_index // (GROUP_M * tiles_n)
        group_size_m = tl.minimum(tiles_m - m_group * GROUP_M, GROUP_M)
        index_in_group = tile_index % (GROUP_M * tiles_n)
        row = (m_group * GROUP_M + index_in_group % group_size_m) * BLOCK_M
        col = index_in_group // group_size_m * BLOCK_N

        # Load the range of K of the group
        k_begin = tl.load(ends + group - 1, mask=group > 0, other=0)
        k_begin = tl.minimum(tl.maximum(k_begin, 0), T)
        k_end = tl.minimum(tl.maximum(tl.load(ends + group), k_begin), T)
        full_blocks = (k_end - k_begin) // BLOCK_K
        a_ptr = a + row.to(tl.int64) * stride_am
        b_ptr = b + col.to(tl.int64) * stride_bn
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)

        # Accumulate the full blocks along K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(full_blocks):
            start = k_begin + k_block * BLOCK_K
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
                a_k_ptr = a_ptr + start.to(tl.int64) * stride_ak
                b_k_ptr = b_ptr + start.to(tl.int64) * stride_bk
                x = _load(a_k_ptr, offs_m, offs_k[None, :], M - row, BLOCK_K, stride_am, stride_ak, CLAMP_A, True)
                y = _load(b_k_ptr, offs_n, offs_k[:, None], N - col, BLOCK_K, stride_bn, stride_bk, CLAMP_B, True)
            if SCALING == NO_SCALES:
                acc = _dot_acc(acc, x, y, MAX_IMPRECISE)
            else:
                acc_tmp = tl.dot(x, y)  # 128 of K: the most that tensor cores may accumulate alone
                scale_idx = start // 128
                row_scale = _row_scales(
                    scale_a, scale_idx * 0, row, M - row, scale_idx, 0, stride_sam, stride_sak, BLOCK_M
                )
                col_scale = _row_scales(
                    scale_b, scale_idx * 0, col, N - col, scale_idx, 0, stride_sbn, stride_sbk, BLOCK_N
                )
                acc += acc_tmp * row_scale[:, None] * col_scale[None, :]

        # Accumulate the rest of the group; scaled groups end at a multiple of 128, so they have none
        if SCALING == NO_SCALES:
            start = k_begin + full_blocks * BLOCK_K
            if start < k_end:
                a_k_ptr = a_ptr + start.to(tl.int64) * stride_ak
                b_k_ptr = b_ptr + start.to(tl.int64) * stride_bk
                k_left = k_end - start
                x = _load(a_k_ptr, offs_m, offs_k[None, :], M - row, k_left, stride_am, stride_ak, CLAMP_A, False)
                y = _load(b_k_ptr, offs_n, offs_k[:, None], N - col, k_left, stride_bn, stride_bk, CLAMP_B, False)
                acc = _dot_acc(acc, x, y, MAX_IMPRECISE)

        # Epilogue, in parts of the columns to save registers
        parts = _parts_of(acc, PARTS)
        for i in tl.static_range(PARTS):
            part_col = col + i * WIDTH
            value = _epilogue(
                parts[i], 1.0, None, c, group, row, part_col, M, N, N_d,
                0, stride_cg, stride_cm, stride_cn, VECTOR_C, "", PRECISE, WIDE,
            ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([group, row, part_col], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, group, row, part_col, M, N_d, stride_dg, stride_dm, WIDE)
