"""The kernels of the Triton GEMM: tiles and their order, the loop along K, the epilogue, and the sum over parts of K.

The epilogue is one function for both kernels and both ways of loading.  Inside a tile offsets are 32 bits wide unless
WIDE; whatever leads to a tile (batch, rows, columns, the place along K) is 64 bits wide.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.exponential import exp


@triton.jit
def _tile_at(
    tile, B, tiles_m, tiles_n, splits, BAND: tl.constexpr
):  # -> split, batch, tile row, tile column; bands of BAND tile rows, walked column by column
    per_product = tiles_m * tiles_n
    at = tile // per_product
    place = tile % per_product
    band = place // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = place % (BAND * tiles_n)
    return at // B, at % B, band * BAND + inside % height, inside // height


@triton.jit
def _multiple(n, of: tl.constexpr):
    """`n`, which is a multiple of `of`, in a form that says so: Triton itself sees no other multiples than of 16."""
    return n // of * of if of > 1 else n


@triton.jit
def _offsets(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    return offs.to(tl.int64) if WIDE else offs


@triton.jit
def _load(at, offs, offs_k, rows, k, stride, stride_k, CLAMP: tl.constexpr, EVEN_K: tl.constexpr):
    """The tile of an operand at `at`: a's, offs[:, None] and offs_k[None, :], or b's, the other way round.

    `rows` and `k` are left from there; zeros where K ends.  What lies beyond `rows` is never stored: CLAMP reads the
    last row instead, which spares a predicate for each element, but hides from the compiler that rows are neighbours.
    So it is not for operands that vectors are read from along rows.
    """
    if CLAMP:
        places = at + (tl.minimum(offs, rows - 1) * stride + offs_k * stride_k)
        if EVEN_K:
            x = tl.load(places)
        else:
            x = tl.load(places, mask=offs_k < k, other=0.0)
    else:
        inside = offs < rows
        if not EVEN_K:
            inside = inside & (offs_k < k)
        x = tl.load(at + (offs * stride + offs_k * stride_k), mask=inside, other=0.0)
    return x


@triton.jit
def _add_product(acc, x, y, SHORT: tl.constexpr):
    """acc + x @ y.  SHORT: elements along K that the tensor cores may sum by themselves, 0 without such a limit."""
    if x.dtype == tl.float32:
        # Short chains of products, added up, round less than one long chain; a limit that is not zero keeps the
        # compiler from joining them
        acc += tl.dot(x, y, input_precision="ieee", max_num_imprecise_acc=x.shape[1])
    else:
        acc = tl.dot(x, y, acc, input_precision="ieee", max_num_imprecise_acc=SHORT)
    return acc


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):  # of e^-|x|: no overflow
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
def _halves(x):  # (BLOCK_M, BLOCK_N) -> its left and its right half; registers stay where they are
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _factor(scale, alpha):
    return alpha if scale is None else alpha * tl.load(scale)


@triton.jit
def _finish(
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
        at = c + (batch.to(tl.int64) * stride_cb + row.to(tl.int64) * stride_cm + col.to(tl.int64) * stride_cn)
        inside = (offs_m < M - row) & (offs_n < _multiple(N_out, VECTOR_C) - col)
        z += tl.load(at + (offs_m * stride_cm + offs_n * stride_cn), mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def _store(d, value, batch, row, col, M, N, stride_db, stride_dm, WIDE: tl.constexpr):  # d: (B, M, N) by stride
    offs_m = _offsets(value.shape[0], WIDE)[:, None]
    offs_n = tl.arange(0, value.shape[1])[None, :]
    at = d + (batch.to(tl.int64) * stride_db + row.to(tl.int64) * stride_dm + col)
    tl.store(at + (offs_m * stride_dm + offs_n), value, mask=(offs_m < M - row) & (offs_n < N - col))


@triton.jit
def gemm_kernel(
    d, a, b, bias, c, scale, alpha,  # d: (splits * B, M, N_out)   a: (B, M, K)   b: (B, K, N)   all by stride
    B, M, N, K, splits, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_bias, stride_cb, stride_cm, stride_cn,
    ACT: tl.constexpr, DESCRIPTORS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d = act(alpha * scale * a @ b + bias) + c, tile by tile; with SPLIT one product a part of K."""
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
    blocks = tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_N // PARTS // GATED
    PRECISE: tl.constexpr = d.dtype.element_ty == tl.float32
    # Hopper adds float8 products up in 14 bits; after this many along K they go into a float32 accumulator
    SHORT: tl.constexpr = min(BLOCK_K, 128) if a.dtype.element_ty.primitive_bitwidth == 8 else 0
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
        split, batch, tile_m, tile_n = _tile_at(tile, B, tiles_m, tiles_n, splits, BAND)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first = 0
        last = blocks
        if SPLIT:
            per_split = tl.cdiv(blocks, splits)
            first = split * per_split
            last = tl.minimum(first + per_split, blocks)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(first, last):
            start = block * BLOCK_K
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
                at_k = start.to(tl.int64)
                at_a = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am + at_k * stride_ak)
                at_b = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn + at_k * stride_bk)
                offs_m = _offsets(BLOCK_M, WIDE)[:, None]
                offs_n = _offsets(BLOCK_N, WIDE)[None, :]
                offs_k = _offsets(BLOCK_K, WIDE)
                k_left = K - start
                x = _load(at_a, offs_m, offs_k[None, :], M - row, k_left, stride_am, stride_ak, CLAMP_A, EVEN_K)
                y = _load(at_b, offs_n, offs_k[:, None], N - col, k_left, stride_bn, stride_bk, CLAMP_B, EVEN_K)
            acc = _add_product(acc, x, y, SHORT)
        at = split * B + batch
        parts = (acc,)
        if PARTS >= 2:
            parts = _halves(acc)
        if PARTS >= 4:
            left, right = parts
            parts = _halves(left) + _halves(right)
        for i in tl.static_range(PARTS):
            here = col + i * (BLOCK_N // PARTS)
            value = _finish(
                parts[i], factor, bias, c, batch, row, here, M, N, N_out,
                stride_bias, stride_cb, stride_cm, stride_cn, VECTOR_C, ACT, PRECISE, WIDE,
            ).to(d.dtype.element_ty)  # fmt: skip
            if DESCRIPTORS:
                d_desc.store([at, row, here // GATED], value.reshape(1, BLOCK_M, WIDTH))
            else:
                _store(d, value, at, row, here // GATED, M, N_out, stride_db, stride_dm, WIDE)


@triton.jit
def reduce_kernel(
    d, partials, bias, c, scale, alpha,  # d: (B, M, N_out)   partials: (splits, B, M, N) fp32, contiguous
    B, M, N, splits, stride_db, stride_dm, stride_bias, stride_cb, stride_cm, stride_cn,
    ACT: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d = act(alpha * scale * (partials[0] + partials[1] + ...) + bias) + c."""
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    _, batch, tile_m, tile_n = _tile_at(tl.program_id(0), B, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 1, 1)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    inside = (offs_m < M - row) & (offs_n < N - col)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(splits):
        line = (split * B + batch).to(tl.int64) * M + row
        acc += tl.load(partials + line * N + col + (offs_m * N + offs_n), mask=inside, other=0.0)
    value = _finish(
        acc, _factor(scale, alpha), bias, c, batch, row, col, M, N, N // GATED,
        stride_bias, stride_cb, stride_cm, stride_cn, 1, ACT, d.dtype.element_ty == tl.float32, WIDE,
    )  # fmt: skip
    value = value.to(d.dtype.element_ty)
    _store(d, value, batch, row, col // GATED, M, N // GATED, stride_db, stride_dm, WIDE)
