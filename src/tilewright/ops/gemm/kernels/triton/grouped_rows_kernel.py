"""The Triton kernel of groups of rows: the group of a tile, the loop along K, an epilogue that ends with the group.

Row limits come from device memory.  A tile may read rows after the end of its group, but does not store them.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import (
    _activate,
    _dot_acc,
    _load,
    _multiple,
    _offsets,
    _parts_of,
)

NO_SCALES = tl.constexpr(-1)
TOKEN_BLOCK = tl.constexpr(2)


@triton.jit
def _row_limits(group, mask, starts, ends, R, BATCHED: tl.constexpr):
    """Returns the first row of each group and the row after its last, clamped to 0..R; 0, 0 where not `mask`."""
    last = tl.load(ends + group, mask=mask, other=0)
    if starts is not None:
        first = tl.load(starts + group, mask=mask, other=0)
    elif BATCHED:
        first = last * 0
    else:
        first = tl.load(ends + group - 1, mask=mask & (group > 0), other=0)
    return tl.minimum(tl.maximum(first, 0), R), tl.minimum(tl.maximum(last, 0), R)


@triton.jit
def _row_tiles(group, starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr):
    first, last = _row_limits(group, group < G, starts, ends, R, BATCHED)
    return tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)


@triton.jit
def _all_row_tiles(starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    num_tiles = 0
    for first_group in range(0, G, GROUPS):
        num_tiles += tl.sum(_row_tiles(first_group + tl.arange(0, GROUPS), starts, ends, G, R, BATCHED, BLOCK_M))
    return num_tiles


@triton.jit
def _group_of(tile, tiles_n, starts, ends, G, R, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the group of a tile, and the tile rows of all groups before it; tiles are numbered group by group."""
    group = 0
    tiles_before = 0
    tiles_seen = 0
    for first_group in range(0, G, GROUPS):
        groups = first_group + tl.arange(0, GROUPS)
        tiles = _row_tiles(groups, starts, ends, G, R, BATCHED, BLOCK_M)
        tiles_end = tiles_seen + tl.cumsum(tiles, 0)
        is_earlier = (tiles_end * tiles_n <= tile) & (groups < G)
        group += tl.sum(is_earlier.to(tl.int32))
        tiles_before += tl.sum(tl.where(is_earlier, tiles, 0))
        tiles_seen += tl.sum(tiles)
    return group, tiles_before


@triton.jit
def _store_rows(d, value, batch, row, row_end, col, N, stride_db, stride_dm, WIDE: tl.constexpr):
    offs_m = _offsets(value.shape[0], WIDE)[:, None]
    offs_n = tl.arange(0, value.shape[1])[None, :]
    ptr = d + (batch.to(tl.int64) * stride_db + row.to(tl.int64) * stride_dm + col)
    tl.store(ptr + (offs_m * stride_dm + offs_n), value, mask=(offs_m < row_end - row) & (offs_n < N - col))


@triton.jit
def _row_scales(scale, batch, row, rows, k_block, stride_b, stride_r, stride_k, BLOCK: tl.constexpr):  # -> (BLOCK,)
    offs = tl.arange(0, BLOCK)
    ptr = scale + (batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_r + k_block.to(tl.int64) * stride_k)
    return tl.load(ptr + tl.minimum(offs, rows - 1) * stride_r)


@triton.jit
def grouped_rows_kernel(
    d, a, b, scale_a, scale_b, starts, ends,  # d: (Ba, R, N_out)   a: (Ba, R, K)   b: (G, K, N)   all by stride
    G, R, N, K, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_sab, stride_sam, stride_sak, stride_sbb, stride_sbn, stride_sbk,  # stride 0 where all share one scale
    ACT: tl.constexpr, SCALING: tl.constexpr, BATCHED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_D: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d = act(rows of a in group g @ b[g]): persistent programs take the tiles of all groups in turn."""
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper accumulates float8 products in 14 bits; after this many along K they are added to a float32 accumulator
    MAX_IMPRECISE: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0

    # Tell the compiler what is a multiple of 16 bytes
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

    # Describe operands and result to TMA
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
    k_blocks = tl.cdiv(K, BLOCK_K)
    num_tiles = _all_row_tiles(starts, ends, G, R, BATCHED, BLOCK_M, GROUPS) * tiles_n
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Find the group of the tile
        group, tiles_before = _group_of(tile, tiles_n, starts, ends, G, R, BATCHED, BLOCK_M, GROUPS)
        first, last = _row_limits(group, group < G, starts, ends, R, BATCHED)
        batch = group if BATCHED else group * 0

        # Find the tile in grouped order: GROUP_M tile rows of a group at a time, column by column
        tile_index = tile - tiles_before * tiles_n
        m_group = tile_index // (GROUP_M * tiles_n)
        group_size_m = tl.minimum(tl.cdiv(last - first, BLOCK_M) - m_group * GROUP_M, GROUP_M)
        index_in_group = tile_index % (GROUP_M * tiles_n)
        row = first + (m_group * GROUP_M + index_in_group % group_size_m) * BLOCK_M
        col = index_in_group // group_size_m * BLOCK_N
        a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am)
        b_ptr = b + (group.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn)
        offs_m = _offsets(BLOCK_M, WIDE)[:, None]
        offs_n = _offsets(BLOCK_N, WIDE)[None, :]
        offs_k = _offsets(BLOCK_K, WIDE)

        # Accumulate along K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(k_blocks):
            start = k_block * BLOCK_K
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
                a_k_ptr = a_ptr + start.to(tl.int64) * stride_ak
                b_k_ptr = b_ptr + start.to(tl.int64) * stride_bk
                x = _load(
                    a_k_ptr, offs_m, offs_k[None, :], last - row, K - start, stride_am, stride_ak, CLAMP_A, EVEN_K
                )
                y = _load(b_k_ptr, offs_n, offs_k[:, None], N - col, K - start, stride_bn, stride_bk, CLAMP_B, EVEN_K)
            if SCALING >= TOKEN_BLOCK:
                acc_tmp = tl.dot(x, y)  # 128 of K: the most that tensor cores may accumulate alone
                scale_idx = start // 128
                row_scale = _row_scales(
                    scale_a, batch, row, last - row, scale_idx, stride_sab, stride_sam, stride_sak, BLOCK_M
                )  # fmt: skip
                if SCALING == TOKEN_BLOCK:  # a tile lies inside the 128 columns that share a scale
                    scale_offset = group.to(tl.int64) * stride_sbb + (col // 128).to(tl.int64) * stride_sbn
                    acc += (
                        acc_tmp
                        * (row_scale * tl.load(scale_b + scale_offset + scale_idx.to(tl.int64) * stride_sbk))[:, None]
                    )
                else:
                    col_scale = _row_scales(
                        scale_b, group, col, N - col, scale_idx, stride_sbb, stride_sbn, stride_sbk, BLOCK_N
                    )  # fmt: skip
                    acc += acc_tmp * row_scale[:, None] * col_scale[None, :]
            else:
                acc = _dot_acc(acc, x, y, MAX_IMPRECISE)

        # Apply scales that are constant along K
        if SCALING != NO_SCALES and SCALING < TOKEN_BLOCK:
            row_scale = _row_scales(scale_a, batch, row, last - row, group * 0, stride_sab, stride_sam, 0, BLOCK_M)
            col_scale = _row_scales(scale_b, group, col, N - col, group * 0, stride_sbb, stride_sbn, 0, BLOCK_N)
            acc = acc * row_scale[:, None] * col_scale[None, :]

        # Epilogue, in parts of the columns to save registers; TMA stores only tiles that end inside the group
        parts = _parts_of(acc, PARTS)
        for i in tl.static_range(PARTS):
            part_col = (col + i * (BLOCK_N // PARTS)) // GATED
            value = _activate(parts[i], ACT, PRECISE).to(d.dtype.element_ty)
            if DESCRIPTORS:
                if row + BLOCK_M <= last:
                    d_desc.store([batch, row, part_col], value.reshape(1, BLOCK_M, WIDTH))
                else:
                    _store_rows(d, value, batch, row, last, part_col, N_out, stride_db, stride_dm, WIDE)
            else:
                _store_rows(d, value, batch, row, last, part_col, N_out, stride_db, stride_dm, WIDE)
