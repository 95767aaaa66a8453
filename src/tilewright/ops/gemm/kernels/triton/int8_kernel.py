"""The kernels of the int8 Triton GEMM: the loop along K with int32 sums, and the reduction of parts of K.

Tiles, loads and what follows the scales are those of `dense_kernel.py`.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import (
    _blocks_of_split,
    _epilogue,
    _load,
    _multiple,
    _offsets,
    _parts_of,
    _store,
    _tile_coordinates,
)


@triton.jit
def _load_vector(vector, first, size, stride, WIDTH: tl.constexpr):  # elements from `first` on -> (WIDTH,) fp32
    offs = first + tl.arange(0, WIDTH)
    return tl.load(vector + offs.to(tl.int64) * stride, mask=offs < size, other=0.0)


@triton.jit
def _scaled_epilogue(
    acc, scale_a, scale_b, bias, row, col, M, N, stride_sa, stride_sb, stride_bias,
    ACT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip  # acc: (BLOCK_M, BLOCK_N) int32 at (row, col) -> (BLOCK_M, BLOCK_N_out) fp32
    row_scale = _load_vector(scale_a, row, M, stride_sa, acc.shape[0])
    col_scale = _load_vector(scale_b, col, N, stride_sb, acc.shape[1])
    z = acc.to(tl.float32) * row_scale[:, None] * col_scale[None, :]
    return _epilogue(z, 1.0, bias, None, row, row, col, M, N, N, stride_bias, 0, 0, 0, 1, ACT, PRECISE, False)


@triton.jit(do_not_specialize=("M", "N", "K", "splits", "stride_ds", "stride_dm", "stride_am", "stride_bn"))
def int8_gemm_kernel(
    d, a, b, scale_a, scale_b, bias,  # d: (splits, M, N_out)   a: (M, K)   b: (N, K)   scales: (M,), (N,)   by stride
    M, N, K, splits, stride_ds, stride_dm, stride_am, stride_bn, stride_sa, stride_sb, stride_bias,
    ACT: tl.constexpr, DESCRIPTORS: tl.constexpr, VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr,
    VECTOR_D: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUP_M: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d = act((a @ b.T) * scale_a * scale_b + bias), tile by tile; with SPLIT int32 sums of each part of K."""
    # Tell the compiler what is a multiple of 16 bytes: nothing else of a size changes its code
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    N_out = _multiple(N // GATED, VECTOR_D)
    K = _multiple(K, VECTOR_A)
    stride_am = _multiple(stride_am, VECTOR_A)
    stride_bn = _multiple(stride_bn, VECTOR_B)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    stride_ds = _multiple(stride_ds, VECTOR_D)

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32

    # Describe operands and result to TMA
    if DESCRIPTORS:
        a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
        d_desc = tl.make_tensor_descriptor(d, [splits, M, N_out], [stride_ds, stride_dm, 1], [1, BLOCK_M, WIDTH])

    for tile in tl.range(tl.program_id(0), splits * tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Schedule one tile, and its part of K
        split, _, tile_m, tile_n = _tile_coordinates(tile, 1, tiles_m, tiles_n, splits, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        k_begin = 0
        k_end = k_blocks
        if SPLIT:
            k_begin, k_end = _blocks_of_split(split, splits, k_blocks)

        # Accumulate along K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for k_block in range(k_begin, k_end):
            start = k_block * BLOCK_K
            if DESCRIPTORS:
                x = a_desc.load([row, start])
                y = b_desc.load([col, start]).T
            else:
                a_ptr = a + (row.to(tl.int64) * stride_am + start)
                b_ptr = b + (col.to(tl.int64) * stride_bn + start)
                offs_m = _offsets(BLOCK_M, WIDE)[:, None]
                offs_n = _offsets(BLOCK_N, WIDE)[None, :]
                offs_k = tl.arange(0, BLOCK_K)
                x = _load(a_ptr, offs_m, offs_k[None, :], M - row, K - start, stride_am, 1, True, EVEN_K)
                y = _load(b_ptr, offs_n, offs_k[:, None], N - col, K - start, stride_bn, 1, True, EVEN_K)
            acc = tl.dot(x, y, acc, out_dtype=tl.int32)

        # Epilogue, in parts of the columns to save registers
        parts = _parts_of(acc, PARTS)
        for i in tl.static_range(PARTS):
            part_col = col + i * (BLOCK_N // PARTS)
            if SPLIT:
                value = parts[i]
            else:
                value = _scaled_epilogue(
                    parts[i], scale_a, scale_b, bias, row, part_col, M, N, stride_sa, stride_sb, stride_bias,
                    ACT, PRECISE,
                ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([split, row, part_col // GATED], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, split, row, part_col // GATED, M, N_out, stride_ds, stride_dm, WIDE)


@triton.jit(do_not_specialize=("M", "splits"))
def int8_reduce_kernel(
    d, partials, scale_a, scale_b, bias,  # d: (M, N_out)   partials: (splits, M, N) int32, contiguous
    M, N, splits, stride_dm, stride_sa, stride_sb, stride_bias,
    ACT: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes d = act((partials[0] + partials[1] + ...) * scale_a * scale_b + bias)."""
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    _, batch, tile_m, tile_n = _tile_coordinates(tl.program_id(0), 1, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 1, 1)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M - row) & (offs_n < N - col)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for split in range(splits):
        first = (split * M + row).to(tl.int64) * N + col
        acc += tl.load(partials + first + (offs_m * N + offs_n), mask=mask, other=0)
    value = _scaled_epilogue(
        acc, scale_a, scale_b, bias, row, col, M, N, stride_sa, stride_sb, stride_bias,
        ACT, d.dtype.element_ty == tl.float32,
    ).to(d.dtype.element_ty)  # fmt: skip
    _store(d, value, batch, row, col // GATED, M, N // GATED, 0, stride_dm, WIDE)
