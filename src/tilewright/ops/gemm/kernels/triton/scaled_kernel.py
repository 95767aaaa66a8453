"""The kernels of the scaled Triton GEMM: the loop along K in blocks of 128, and the cast of a result to float8.

Tiles, loads and the epilogue are those of `dense_kernel.py`.
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
from tilewright.ops.quant.kernels.triton.numbers import decode, encode, inverse, magnitude, scale_of

TENSOR, ROW, TOKEN_BLOCK, TOKEN_TOKEN = (tl.constexpr(i) for i in range(4))  # values of `Scaling`
BLOCK_K = tl.constexpr(128)  # elements along K that share a scale, and that tensor cores may accumulate alone


@triton.jit
def _decoded(x):  # e4m3, or its bytes on GPUs without that type -> an operand of tl.dot
    if x.dtype == tl.uint8:
        x = decode(x).to(tl.float16)  # exact: every e4m3 number is a float16 number
    return x


@triton.jit
def _load_scales(scales, first, rows, stride, WIDTH: tl.constexpr):  # the scales of rows from `first` on -> (WIDTH,)
    offs = first + tl.arange(0, WIDTH)
    return tl.load(scales + offs * stride, mask=offs < rows, other=0.0)


@triton.jit
def scaled_gemm_kernel(
    d, a, b, scale_a, scale_b, bias, c, alpha,  # d: (splits * B, M, N_out)   a: (B, M, K)   b: (B, K, N)   by stride
    B, M, N, K, splits, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_sab, stride_sam, stride_sak, stride_sbb, stride_sbn, stride_sbk,  # scales: (B, M | N blocks, K blocks)
    stride_bias, stride_cb, stride_cm, stride_cn,
    SCALING: tl.constexpr, ACT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes d = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c, tile by tile; with SPLIT for each part of K.

    BLOCK_N divides 128, so that a tile lies in one block of columns.  32 bits are enough for offsets of scales: more
    scales would need an operand of 256 GB.
    """
    # Tell the compiler what is a multiple of 16 bytes
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    N_out = _multiple(N // GATED, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    K = _multiple(K, VECTOR_A)
    stride_am = _multiple(stride_am, VECTOR_A)
    stride_bn = _multiple(stride_bn, VECTOR_B)
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_B)
    stride_db = _multiple(stride_db, VECTOR_D)

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32

    # Describe operands and result to TMA
    if DESCRIPTORS:
        a_desc = tl.make_tensor_descriptor(a, [B, M, K], [stride_ab, stride_am, 1], [1, BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [B, N, K], [stride_bb, stride_bn, 1], [1, BLOCK_N, BLOCK_K])
        d_desc = tl.make_tensor_descriptor(d, [splits * B, M, N_out], [stride_db, stride_dm, 1], [1, BLOCK_M, WIDTH])

    for tile in tl.range(tl.program_id(0), splits * B * tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Schedule one tile, and its part of K
        split, batch, tile_m, tile_n = _tile_coordinates(tile, B, tiles_m, tiles_n, splits, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        k_begin = 0
        k_end = k_blocks
        if SPLIT:
            k_begin, k_end = _blocks_of_split(split, splits, k_blocks)

        # Accumulate along K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(k_begin, k_end):
            start = k_block * BLOCK_K
            if DESCRIPTORS:
                x = a_desc.load([batch, row, start]).reshape(BLOCK_M, BLOCK_K)
                y = b_desc.load([batch, col, start]).reshape(BLOCK_N, BLOCK_K).T
            else:
                k_idx = start.to(tl.int64)
                a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am + k_idx * stride_ak)
                b_ptr = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn + k_idx * stride_bk)
                offs_m = _offsets(BLOCK_M, WIDE)[:, None]
                offs_n = _offsets(BLOCK_N, WIDE)[None, :]
                offs_k = _offsets(BLOCK_K, WIDE)
                x = _load(a_ptr, offs_m, offs_k[None, :], M - row, K - start, stride_am, stride_ak, True, EVEN_K)
                y = _load(b_ptr, offs_n, offs_k[:, None], N - col, K - start, stride_bn, stride_bk, True, EVEN_K)

            # Multiply one block of K, and promote it with its scales
            acc_tmp = tl.dot(_decoded(x), _decoded(y))
            if SCALING == TOKEN_BLOCK:
                row_scale = _load_scales(
                    scale_a + batch * stride_sab + k_block * stride_sak, row, M, stride_sam, BLOCK_M
                )
                col_scale = tl.load(scale_b + batch * stride_sbb + col // 128 * stride_sbn + k_block * stride_sbk)
                acc += acc_tmp * (row_scale * col_scale)[:, None]
            elif SCALING == TOKEN_TOKEN:
                row_scale = _load_scales(
                    scale_a + batch * stride_sab + k_block * stride_sak, row, M, stride_sam, BLOCK_M
                )
                col_scale = _load_scales(
                    scale_b + batch * stride_sbb + k_block * stride_sbk, col, N, stride_sbn, BLOCK_N
                )
                acc += acc_tmp * row_scale[:, None] * col_scale[None, :]
            else:
                acc += acc_tmp

        # Epilogue: scales that are constant along K, then parts of the columns to save registers
        if SCALING == TENSOR:
            acc = acc * (tl.load(scale_a + batch * stride_sab) * tl.load(scale_b + batch * stride_sbb))
        elif SCALING == ROW:
            row_scale = _load_scales(scale_a + batch * stride_sab, row, M, stride_sam, BLOCK_M)
            col_scale = _load_scales(scale_b + batch * stride_sbb, col, N, stride_sbn, BLOCK_N)
            acc = acc * row_scale[:, None] * col_scale[None, :]
        d_batch = split * B + batch
        parts = _parts_of(acc, PARTS)
        for i in tl.static_range(PARTS):
            part_col = col + i * (BLOCK_N // PARTS)
            value = _epilogue(
                parts[i], alpha, bias, c, batch, row, part_col, M, N, N_out,
                stride_bias, stride_cb, stride_cm, stride_cn, VECTOR_C, ACT, PRECISE, WIDE,
            ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([d_batch, row, part_col // GATED], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, d_batch, row, part_col // GATED, M, N_out, stride_db, stride_dm, WIDE)


@triton.jit
def cast_kernel(
    q, scales, z, rows, N, stride_sm, stride_sk,  # q: (rows, N) bytes of e4m3, contiguous   z: (rows, N) fp32
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Computes q = z / scale, one scale for 128 elements of a row; a program casts one such group of BLOCK_M rows."""
    row = tl.program_id(0) * BLOCK_M
    group = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = group * 128 + tl.arange(0, 128)
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    value = tl.load(z + offs, mask=mask, other=0.0)  # (BLOCK_M, 128)
    scale = scale_of(tl.max(magnitude(value), 1), False)
    tl.store(scales + (offs_m * stride_sm + group.to(tl.int64) * stride_sk), scale, mask=offs_m < rows)
    tl.store(q + offs, encode(value * inverse(scale)[:, None], q), mask=mask)
