"""The kernel of `single_row.py`: one row of A times a few columns of op(B), FMAs in float32, no tensor cores."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.gemm.kernels.triton.dense_kernel import _epilogue, _factor, _multiple, _offsets, _store


@triton.jit
def row_kernel(
    d, a, b, bias, c, scale, alpha,  # d: (B, M, N_out)   a: (B, M, K)   b: (B, K, N)   all by stride
    M, N, K, stride_db, stride_dm, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_bias, stride_cb, stride_cm, stride_cn,
    ACT: tl.constexpr, B_K_MAJOR: tl.constexpr, VECTOR_A: tl.constexpr, VECTOR_B: tl.constexpr, VECTOR_C: tl.constexpr,
    VECTOR_D: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes d = act(alpha * scale * a @ b + bias) + c; neighbouring programs share a row of A."""
    # Tell the compiler what is a multiple of 16 bytes
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    stride_db = _multiple(stride_db, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_am = _multiple(stride_am, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_B)
    if B_K_MAJOR:
        K = _multiple(K, VECTOR_B)
        stride_bn = _multiple(stride_bn, VECTOR_B)
    else:
        stride_bk = _multiple(stride_bk, VECTOR_B)

    # Find the row and the columns of this program
    tiles_n = tl.cdiv(N, BLOCK_N)
    row_index = tl.program_id(0) // tiles_n
    batch = row_index // M
    row = row_index % M
    col = tl.program_id(0) % tiles_n * BLOCK_N
    offs_n = tl.minimum(_offsets(BLOCK_N, WIDE), N - col - 1)[:, None]  # re-read the last column, never store it
    offs_k = _offsets(BLOCK_K, WIDE)[None, :]
    a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am)
    b_ptr = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bn)

    # Accumulate products elementwise along K
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_idx = tl.cast(start, tl.int64)  # in the interpreter start is a Python int
        a_ptrs = a_ptr + k_idx * stride_ak + offs_k * stride_ak
        b_ptrs = b_ptr + k_idx * stride_bk + (offs_n * stride_bn + offs_k * stride_bk)
        if EVEN_K:
            x = tl.load(a_ptrs)
            y = tl.load(b_ptrs, eviction_policy="evict_first")
        else:
            mask = offs_k < K - start
            x = tl.load(a_ptrs, mask=mask, other=0.0)
            y = tl.load(b_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
        acc += y.to(tl.float32) * x.to(tl.float32)

    # Sum over K, and epilogue
    acc_total = tl.sum(acc, 1)[None, :]
    value = _epilogue(
        acc_total, _factor(scale, alpha), bias, c, batch, row, col, M, N, N // GATED, stride_bias, stride_cb, stride_cm,
        stride_cn, VECTOR_C, ACT, d.dtype.element_ty == tl.float32, WIDE,
    )  # fmt: skip
    _store(d, value.to(d.dtype.element_ty), batch, row, col // GATED, M, N // GATED, stride_db, stride_dm, WIDE)
