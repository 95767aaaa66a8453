"""The first product of `fused_moe` in Triton: rows are gathered by the load of A, gate and up meet in the epilogue."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import _activate, _dot_acc, _multiple
from tilewright.ops.gemm.kernels.triton.grouped_rows_kernel import _all_row_tiles, _group_of, _row_limits


@triton.jit
def gated_rows_kernel(
    hidden, x, w1, slots, starts, ends,  # hidden: (S, I)   x: (T, H)   w1: (E, 2 I, H)
    K, E, S, INNER, H, stride_x, stride_we, stride_wn,
    ACT: tl.constexpr, DESCRIPTORS: tl.constexpr, EVEN_H: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[r] = act(x[slots[r] // K] @ gates^T) * (x[slots[r] // K] @ ups^T), weights of the expert of row r."""
    PRECISE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    stride_x = _multiple(stride_x, VECTOR)
    stride_we = _multiple(stride_we, VECTOR)
    stride_wn = _multiple(stride_wn, VECTOR)
    if DESCRIPTORS:
        w_desc = tl.make_tensor_descriptor(w1, [E, 2 * INNER, H], [stride_we, stride_wn, 1], [1, BLOCK_N, BLOCK_K])
    tiles_n = tl.cdiv(INNER, BLOCK_N)
    k_blocks = tl.cdiv(H, BLOCK_K)
    num_tiles = _all_row_tiles(starts, ends, E, S, False, BLOCK_M, GROUPS) * tiles_n
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The expert of the tile, and the tile among those of the expert: GROUP_M tile rows at a time, column by column
        expert, tiles_before = _group_of(tile, tiles_n, starts, ends, E, S, False, BLOCK_M, GROUPS)
        first, last = _row_limits(expert, expert < E, starts, ends, S, False)
        index = tile - tiles_before * tiles_n
        m_group = index // (GROUP_M * tiles_n)
        group_size_m = tl.minimum(tl.cdiv(last - first, BLOCK_M) - m_group * GROUP_M, GROUP_M)
        in_group = index % (GROUP_M * tiles_n)
        row = first + (m_group * GROUP_M + in_group % group_size_m) * BLOCK_M
        col = in_group // group_size_m * BLOCK_N

        # Rows beyond the last of the expert read that one, and are not stored
        offs_m = tl.arange(0, BLOCK_M)
        token = tl.load(slots + tl.minimum(row + offs_m, last - 1)) // K
        offs_x = (token.to(tl.int64) if WIDE else token)[:, None] * stride_x
        offs_n = tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        w_ptr = w1 + expert.to(tl.int64) * stride_we
        offs_w = tl.minimum(col + offs_n, INNER - 1)[None, :]
        gate_ptr = w_ptr + offs_w.to(tl.int64) * stride_wn
        up_ptr = w_ptr + (offs_w + INNER).to(tl.int64) * stride_wn

        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(k_blocks):
            start = k_block * BLOCK_K
            k_idx = start + offs_k
            if EVEN_H:
                a = tl.load(x + (offs_x + k_idx[None, :]))
            else:
                a = tl.load(x + (offs_x + k_idx[None, :]), mask=k_idx[None, :] < H, other=0.0)
            if DESCRIPTORS:
                g = w_desc.load([expert, col, start]).reshape(BLOCK_N, BLOCK_K).T
                u = w_desc.load([expert, INNER + col, start]).reshape(BLOCK_N, BLOCK_K).T
            else:
                g = tl.load(gate_ptr + k_idx[:, None], mask=k_idx[:, None] < H, other=0.0)
                u = tl.load(up_ptr + k_idx[:, None], mask=k_idx[:, None] < H, other=0.0)
            gate = _dot_acc(gate, a, g, 0)
            up = _dot_acc(up, a, u, 0)

        value = (_activate(gate, ACT, PRECISE) * up).to(hidden.dtype.element_ty)
        offs_d = (row + offs_m).to(tl.int64)[:, None] * INNER + (col + offs_n)[None, :]
        tl.store(hidden + offs_d, value, mask=(row + offs_m < last)[:, None] & (col + offs_n < INNER)[None, :])
