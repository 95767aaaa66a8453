"""RMSNorm in Triton with one fault at a time: what `validate.check` must catch in real kernels.

The kernels are right for FAULT="none" (default form only: weight in x's dtype, no offset).  None of the faults touches
memory outside an allocation of torch, so that a caught fault leaves the process in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl, unregister_impl

OP = "rms_norm"
CACHE: dict[int, Tensor] = {}
LAUNCHES: dict[str, Tensor] = {}  # counts on the device: graphs count their replays
LASTS = 5  # launches before a worn out kernel is wrong


@triton.jit
def forward_kernel(
    y, x, weight, M, N, stride_x, eps,  # x, y: (M, N)   weight: (N,)
    FAULT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    at = row * stride_x + offs_n
    if FAULT == "wrong_stride":
        at = row * N + offs_n
    inside = mask
    if FAULT == "missing_tail_mask":  # the mask ends with the tensor, not with the row
        inside = at < M * stride_x
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 0) / N
    if FAULT == "batch_variant":
        mean = tl.where(M >= 64, tl.sum(wide * wide / N, 0), mean)
    normed = (wide * tl.rsqrt(mean + eps)).to(x.dtype.element_ty).to(tl.float32)
    result = normed * tl.load(weight + offs_n, mask=mask, other=0.0).to(tl.float32)
    if FAULT == "wrong_tile":
        tile = (row >= 64) & (row < 128) & (offs_n >= 128) & (offs_n < 192)
        result = tl.where(tile, result * 1.005, result)
    if FAULT == "nan":
        result = tl.where((row == 3) & (offs_n == 5), float("nan"), result)
    written = mask
    if FAULT == "stale_output":
        written = offs_n < N - 64
    if FAULT == "out_of_bounds":  # 32 bytes after the last row: inside the 512-byte granules of torch's allocator
        written = mask | ((row == M - 1) & (offs_n < N + 16))
    tl.store(y + row * N + offs_n, result.to(y.dtype.element_ty), mask=written)
    if FAULT == "mutated_input":
        tl.store(x + at, (wide * 2).to(x.dtype.element_ty), mask=mask & (row == 0))


@triton.jit
def backward_kernel(
    dx, dweight, rstds, dy, x, weight, M, N, stride_dy, stride_x, eps,  # dy, x, dx: (M, N)   rstds: (M,)
    FAULT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    wide = tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * stride_dy + offs_n, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + offs_n, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    normed = wide * rstd
    g = grad * w
    result = (g - normed * (tl.sum(g * normed, 0) / N)) * rstd
    tl.store(dx + row * N + offs_n, result.to(dx.dtype.element_ty), mask=mask)
    tl.store(rstds + row, rstd)
    if FAULT == "atomic_weight_gradient":
        tl.atomic_add(dweight + offs_n, grad * normed, mask=mask)


@triton.jit
def weight_gradient_kernel(
    dweight, dy, x, rstds, M, N, stride_dy, stride_x,  # dweight: (N,)
    FAULT: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr = 16,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A chain of M additions in float32 is further off than a tree: 2 of 100 draws at M = 192 miss the rule, all at
    # 4096.  So each of ROWS sums takes every ROWS-th row, and these are added in a tree.
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, M, ROWS):
        offs_m = (start + tl.arange(0, ROWS))[:, None]
        mask = (offs_m < M) & (offs_n < N)[None, :]
        rstd = tl.load(rstds + offs_m, mask=offs_m < M, other=0.0)
        normed = tl.load(x + offs_m * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32) * rstd
        grad = tl.load(dy + offs_m * stride_dy + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += grad * normed.to(x.dtype.element_ty).to(tl.float32)
    total = tl.sum(acc, 0)
    if FAULT == "zero_gradient":
        total = tl.zeros((BLOCK_N,), tl.float32)
    tl.store(dweight + offs_n, total.to(dweight.dtype.element_ty), mask=offs_n < N)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Make the kernels with `fault` the triton backend of rms_norm inside the block."""
    CACHE.clear()
    LAUNCHES["forward"] = torch.zeros((), dtype=torch.int64, device="cuda")

    def forward(outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, *_: object, config: None) -> None:
        _forward(fault, outs[0], x, weight, eps)

    def backward(
        outs: tuple[Tensor, Tensor], dy: Tensor, x: Tensor, weight: Tensor, eps: float, *_: object, config: None
    ) -> None:
        _backward(fault, outs, dy, x, weight, eps)

    register_impl(OP, backend="triton")(forward)
    register_impl(OP, backend="triton", direction="bwd")(backward)
    try:
        yield
    finally:
        for direction in ("fwd", "bwd"):
            unregister_impl(OP, backend="triton", direction=direction)


def _forward(fault: str, y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    if fault == "cached_by_pointer" and x.data_ptr() in CACHE and CACHE[x.data_ptr()].shape == y.shape:
        y.copy_(CACHE[x.data_ptr()])
        return
    rows, weight = _rows(x, keep_view=fault == "mutated_input"), weight.contiguous()
    m, n = rows.shape
    stream = torch.cuda.default_stream() if fault == "wrong_stream" else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        forward_kernel[(m,)](y, rows, weight, m, n, rows.stride(0), eps, FAULT=fault, BLOCK_N=triton.next_power_of_2(n))
    if fault == "worn_out":  # as one whose semaphore is never set back
        LAUNCHES["forward"].add_(1)
        y.add_((LAUNCHES["forward"] > LASTS).to(y.dtype))
    if fault == "cached_by_pointer":
        CACHE[x.data_ptr()] = y.clone()


def _backward(fault: str, outs: tuple[Tensor, Tensor], dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    dx, dweight = outs
    grads, rows, weight = _rows(dy), _rows(x), weight.contiguous()
    m, n = rows.shape
    rstds = torch.empty(m, dtype=torch.float32, device=x.device)
    atomic = fault == "atomic_weight_gradient" and dweight.numel() > 0
    if atomic:
        dweight.zero_()
    backward_kernel[(m,)](
        dx, dweight, rstds, grads, rows, weight, m, n, grads.stride(0), rows.stride(0), eps,
        FAULT=fault if atomic else "none", BLOCK_N=triton.next_power_of_2(n),
    )  # fmt: skip
    if dweight.numel() and not atomic:
        weight_gradient_kernel[(triton.cdiv(n, 64),)](
            dweight, grads, rows, rstds, m, n, grads.stride(0), rows.stride(0), FAULT=fault, BLOCK_N=64
        )


def _rows(t: Tensor, keep_view: bool = False) -> Tensor:
    rows = t.reshape(-1, t.shape[-1])
    return rows if keep_view or rows.stride(1) == 1 else rows.contiguous()
