"""The kernels of the Triton GEMM: tile order, the loop along K, the epilogue, and the split-K reduction.

Both kernels, and both ways of loading, share the epilogue.  Offsets inside a tile have 32 bits, or 64 if WIDE; offsets
of a tile (of batch, row, column, K) always have 64 bits.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.exponential import exp


@triton.jit
def _tile_coordinates(
    tile, B, tiles_m, tiles_n, splits, GROUP_M: tl.constexpr
):  # -> split, batch, tile row, tile column; grouped order: GROUP_M tile rows at a time, column by column
    tiles_per_product = tiles_m * tiles_n
    index = tile // tiles_per_product
    tile_index = tile % tiles_per_product
    m_group = tile_index // (GROUP_M * tiles_n)
    group_size_m = tl.minimum(tiles_m - m_group * GROUP_M, GROUP_M)
    index_in_group = tile_index % (GROUP_M * tiles_n)
    return index // B, index % B, m_group * GROUP_M + index_in_group % group_size_m, index_in_group // group_size_m


@triton.jit
def _multiple(n, divisor: tl.constexpr):
    """Returns `n`, a multiple of `divisor`, in a form that says so: Triton itself infers only multiples of 16."""
    return n // divisor * divisor if divisor > 1 else n


@triton.jit
def _offsets(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    return offs.to(tl.int64) if WIDE else offs


@triton.jit
def _load(ptr, offs, offs_k, rows, k, stride, stride_k, CLAMP: tl.constexpr, EVEN_K: tl.constexpr):
    """Loads the tile of an operand at `ptr`: of a with offs[:, None] and offs_k[None, :], of b transposed.

    `rows` and `k` remain from there; elements beyond K are zeros.  Rows beyond `rows` are never stored: CLAMP reads the
    last row instead, which saves a predicate for each element, but hides from the compiler that rows are contiguous.
    So operands that are contiguous along rows, and read as vectors, do not CLAMP.
    """
    if CLAMP:
        ptrs = ptr + (tl.minimum(offs, rows - 1) * stride + offs_k * stride_k)
        if EVEN_K:
            x = tl.load(ptrs)
        else:
            x = tl.load(ptrs, mask=offs_k < k, other=0.0)
    else:
        mask = offs < rows
        if not EVEN_K:
            mask = mask & (offs_k < k)
        x = tl.load(ptr + (offs * stride + offs_k * stride_k), mask=mask, other=0.0)
    return x


@triton.jit
def _dot_acc(acc, x, y, MAX_IMPRECISE: tl.constexpr):
    """Returns acc + x @ y.  MAX_IMPRECISE: elements along K that tensor cores may accumulate alone, 0 for no limit."""
    if x.dtype == tl.float32:
        # Short chains of FMAs, added up, round less than one long chain; a nonzero limit keeps the compiler from
        # joining them
        acc += tl.dot(x, y, input_precision="ieee", max_num_imprecise_acc=x.shape[1])
    else:
        acc = tl.dot(x, y, acc, input_precision="ieee", max_num_imprecise_acc=MAX_IMPRECISE)
    return acc


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):  # from e^-|x|, which cannot overflow
    e = exp(-tl.abs(x), PRECISE)
    large = 1.0 / (1.0 + e)
    return tl.where(x >= 0, large, e * large)


@triton.jit
def _activate(z, ACT: tl.constexpr, PRECISE: tl.constexpr):  # z: (BLOCK_M, BLOCK_N) fp32; half the columns if gated
    if ACT == "relu":
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    elif ACT == "gelu":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        z = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PRECISE)
    elif ACT == "silu":
        z = z * _sigmoid(z, PRECISE)
    elif ACT == "swiglu":
        gate, up = tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))
        z = gate * _sigmoid(gate, PRECISE) * up
    return z


@triton.jit
def _split_columns(x):  # (BLOCK_M, BLOCK_N) -> left half, right half; no data moves between threads
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _parts_of(acc, PARTS: tl.constexpr):  # (BLOCK_M, BLOCK_N) -> 1, 2 or 4 parts of its columns, in their order
    parts = (acc,)
    if PARTS >= 2:
        parts = _split_columns(acc)
    if PARTS >= 4:
        left, right = parts
        parts = _split_columns(left) + _split_columns(right)
    return parts


@triton.jit
def _blocks_of_split(split, splits, k_blocks):  # -> the first of this part of K, and the one behind its last
    blocks_per_split = tl.cdiv(k_blocks, splits)
    k_begin = split * blocks_per_split
    return k_begin, tl.minimum(k_begin + blocks_per_split, k_blocks)


@triton.jit
def _factor(scale, alpha):
    return alpha if scale is None else alpha * tl.load(scale)


@triton.jit
def _epilogue(
    acc, factor, bias, c, batch, row, col, M, N, N_out, stride_bias, stride_cb, stride_cm, stride_cn,
    VECTOR_C: tl.constexpr, ACT: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip  # acc: (BLOCK_M, BLOCK_N) fp32 at (row, col)   bias: (N,)   c: (B, M, N_out) -> (BLOCK_M, BLOCK_N_out)
    z = acc * factor
    if bias is not None:
        offs_n = col + tl.arange(0, z.shape[1])
        z += tl.load(bias + offs_n.to(tl.int64) * stride_bias, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    z = _activate(z, ACT, PRECISE)
    if c is not None:
        if ACT == "swiglu":
            col = col // 2
        offs_m = _offsets(z.shape[0], WIDE)[:, None]
        offs_n = _offsets(z.shape[1], WIDE)[None, :]
        stride_cb = _multiple(stride_cb, VECTOR_C)
        stride_cm = _multiple(stride_cm, VECTOR_C)
        ptr = c + (batch.to(tl.int64) * stride_cb + row.to(tl.int64) * stride_cm + col.to(tl.int64) * stride_cn)
        mask = (offs_m < M - row) & (offs_n < _multiple(N_out, VECTOR_C) - col)
        z += tl.load(ptr + (offs_m * stride_cm + offs_n * stride_cn), mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def _store(d, value, batch, row, col, M, N, stride_db, stride_dm, WIDE: tl.constexpr):  # d: (B, M, N) by stride
    offs_m = _offsets(value.shape[0], WIDE)[:, None]
    offs_n = tl.arange(0, value.shape[1])[None, :]
    ptr = d + (batch.to(tl.int64) * stride_db + row.to(tl.int64) * stride_dm + col)
    tl.store(ptr + (offs_m * stride_dm + offs_n), value, mask=(offs_m < M - row) & (offs_n < N - col))


@triton.jit
def gemm_kernel(
    d, a, b, bias, c, scale, alpha,  # d: (splits * B, M, N_out)   a: (B, M, K)   b: (B, K, N)   all by stride
    B, M, N, K, splits, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_bias, stride_cb, stride_cm, stride_cn,
    ACT: tl.constexpr, DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d = act(alpha * scale * a @ b + bias) + c, tile by tile; with SPLIT one product for each part of K."""
    # Tell the compiler what is a multiple of 16 bytes
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    N_out = _multiple(N // GATED, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    if A_K_MAJOR:
        K = _multiple(K, VECTOR_A)
        stride_am = _multiple(stride_am, VECTOR_A)
    else:
        M = _multiple(M, VECTOR_A)
        stride_ak = _multiple(stride_ak, VECTOR_A)
    if B_K_MAJOR:
        K = _multiple(K, VECTOR_B)
        stride_bn = _multiple(stride_bn, VECTOR_B)
    else:
        N = _multiple(N, VECTOR_B)
        stride_bk = _multiple(stride_bk, VECTOR_B)
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_B)
    stride_db = _multiple(stride_db, VECTOR_D)
    CLAMP_A: tl.constexpr = A_K_MAJOR or VECTOR_A == 1
    CLAMP_B: tl.constexpr = B_K_MAJOR or VECTOR_B == 1

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper accumulates float8 products in 14 bits; after this many along K they are added to a float32 accumulator
    MAX_IMPRECISE: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0

    # Describe operands and result to TMA
    if DESCRIPTORS:
        if A_K_MAJOR:
            a_desc = tl.make_tensor_descriptor(a, [B, M, K], [stride_ab, stride_am, 1], [1, BLOCK_M, BLOCK_K])
        else:
            a_desc = tl.make_tensor_descriptor(a, [B, K, M], [stride_ab, stride_ak, 1], [1, BLOCK_K, BLOCK_M])
        if B_K_MAJOR:
            b_desc = tl.make_tensor_descriptor(b, [B, N, K], [stride_bb, stride_bn, 1], [1, BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b, [B, K, N], [stride_bb, stride_bk, 1], [1, BLOCK_K, BLOCK_N])
        d_desc = tl.make_tensor_descriptor(d, [splits * B, M, N_out], [stride_db, stride_dm, 1], [1, BLOCK_M, WIDTH])
    factor = _factor(scale, alpha)

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
                if A_K_MAJOR:
                    x = a_desc.load([batch, row, start]).reshape(BLOCK_M, BLOCK_K)
                else:
                    x = a_desc.load([batch, start, row]).reshape(BLOCK_K, BLOCK_M).T
                if B_K_MAJOR:
                    y = b_desc.load([batch, col, start]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    y = b_desc.load([batch, start, col]).reshape(BLOCK_K, BLOCK_N)
            else:
                k_idx = start.to(tl.int64)
                a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am + k_idx * stride_ak)
                b_ptr = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn + k_idx * stride_bk)
                offs_m = _offsets(BLOCK_M, WIDE)[:, None]
                offs_n = _offsets(BLOCK_N, WIDE)[None, :]
                offs_k = _offsets(BLOCK_K, WIDE)
                k_left = K - start
                x = _load(a_ptr, offs_m, offs_k[None, :], M - row, k_left, stride_am, stride_ak, CLAMP_A, EVEN_K)
                y = _load(b_ptr, offs_n, offs_k[:, None], N - col, k_left, stride_bn, stride_bk, CLAMP_B, EVEN_K)
            acc = _dot_acc(acc, x, y, MAX_IMPRECISE)

        # Epilogue, in parts of the columns to save registers
        d_batch = split * B + batch
        parts = _parts_of(acc, PARTS)
        for i in tl.static_range(PARTS):
            part_col = col + i * (BLOCK_N // PARTS)
            value = _epilogue(
                parts[i], factor, bias, c, batch, row, part_col, M, N, N_out,
                stride_bias, stride_cb, stride_cm, stride_cn, VECTOR_C, ACT, PRECISE, WIDE,
            ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([d_batch, row, part_col // GATED], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, d_batch, row, part_col // GATED, M, N_out, stride_db, stride_dm, WIDE)


@triton.jit
def reduce_kernel(
    d, partials, bias, c, scale, alpha,  # d: (B, M, N_out)   partials: (splits, B, M, N) fp32, contiguous
    B, M, N, splits, stride_db, stride_dm, stride_bias, stride_cb, stride_cm, stride_cn,
    ACT: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes d = act(alpha * scale * (partials[0] + partials[1] + ...) + bias) + c."""
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    _, batch, tile_m, tile_n = _tile_coordinates(tl.program_id(0), B, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 1, 1)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M - row) & (offs_n < N - col)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(splits):
        partial_row = (split * B + batch).to(tl.int64) * M + row
        acc += tl.load(partials + partial_row * N + col + (offs_m * N + offs_n), mask=mask, other=0.0)
    value = _epilogue(
        acc, _factor(scale, alpha), bias, c, batch, row, col, M, N, N // GATED,
        stride_bias, stride_cb, stride_cm, stride_cn, 1, ACT, d.dtype.element_ty == tl.float32, WIDE,
    )  # fmt: skip
    value = value.to(d.dtype.element_ty)
    _store(d, value, batch, row, col // GATED, M, N // GATED, stride_db, stride_dm, WIDE)
