"""Small Triton kernels with known virtues and faults, to test the test harness itself."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_sum_kernel(x, out, N, BLOCK_N: tl.constexpr):  # x: (M, N)  out: (M,) fp32
    row = tl.program_id(0)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        acc += tl.load(x + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(acc))


@triton.jit
def matmul_kernel(a, b, c, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # a, b: (BLOCK, BLOCK)  c: the same, fp32
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    acc = tl.dot(tl.load(a + rows * BLOCK + cols), tl.load(b + rows * BLOCK + cols), input_precision=PRECISION)
    tl.store(c + rows * BLOCK + cols, acc)


@triton.jit
def many_live_values_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Keeps STEPS tiles alive across a second pass: more registers than a thread has."""
    offsets = tl.arange(0, BLOCK)
    tiles = ()
    for i in tl.static_range(STEPS):
        tiles = tiles + (tl.load(x + i * BLOCK + offsets),)  # noqa: RUF005 - Triton's language has no starred tuples
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(STEPS):
        total += tiles[i]
    tl.debug_barrier()
    for i in tl.static_range(STEPS):
        tl.store(out + i * BLOCK + offsets, tiles[i] * tl.sum(total))


@triton.jit
def bf16_arithmetic_kernel(x, y, out, N, BLOCK: tl.constexpr):  # out = max(x * y + x, y), every step in bf16
    offsets = tl.arange(0, BLOCK)
    mask = offsets < N
    a, b = tl.load(x + offsets, mask=mask), tl.load(y + offsets, mask=mask)
    tl.store(out + offsets, tl.where(a * b + a > b, a * b + a, b), mask=mask)


@triton.jit
def bf16_sum_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def first_largest(value, place, other, elsewhere):
    earlier = (value > other) | ((value == other) & (place < elsewhere))
    return tl.where(earlier, value, other), tl.where(earlier, place, elsewhere)


@triton.jit
def largest_kernel(x, values, places, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    """For each element of x (M, N): the largest number along AXIS, None for all, and its place."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    value, place = tl.reduce((tl.load(x + at), at), AXIS, first_largest, keep_dims=True)
    tl.store(values + at, tl.broadcast_to(value, M, N))
    tl.store(places + at, tl.broadcast_to(place, M, N))


@triton.jit
def wrapping_kernel(x, out):  # x: one int32  out: three int64, the last computed in 64 bits
    number = tl.load(x)
    tl.store(out, (number + number).to(tl.int64))
    tl.store(out + 1, (number * 3 - 1).to(tl.int64))
    tl.store(out + 2, number.to(tl.int64) * 3 - 1)


@triton.jit
def cast_kernel(x, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets).to(out.dtype.element_ty))


tuned_row_sum_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK_N": n}, num_warps=w) for n, w in ((256, 2), (1024, 8))], key=["N"]
)(row_sum_kernel)


def row_sum(x: torch.Tensor, kernel: object = row_sum_kernel, **config: int) -> torch.Tensor:
    """Sum of each row in fp32; `x`: (M, N), contiguous."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    kernel[(x.shape[0],)](x, out, x.shape[1], **config)  # type: ignore[index]
    return out
