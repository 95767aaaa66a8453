"""moe_unpermute in Triton: a program adds the k weighted rows of a token; backwards it reads the token's gradient once.

dx[positions[t, j]] = weights[t, j] dy[t], dweights[t, j] = sum(x[positions[t, j]] dy[t]): a program of the backward
takes whole rows, so that no sum is divided.
Traffic: T*k*H read, T*H written; backwards T*k*H read and written: 4096 tokens of 7168 in bf16, k = 8, are 528 MB, 120
us at 4.4 TB/s, and 1 GB, 250 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN, any_dropped, row_of_numbers, zero_dropped
from tilewright.ops.moe.moe_permute import OrderBucket
from tilewright.ops.moe.moe_unpermute import BACKWARD, FORWARD, MoeUnpermuteArgs, MoeUnpermuteBackwardArgs
from tilewright.ops.rows import as_rows, no_float64


class Config(NamedTuple):
    """block_n: columns of a program, or of one step of the backward."""

    block_n: int
    num_warps: int


CONFIGS = (Config(512, 2), Config(1024, 4))
LONG = (*CONFIGS, Config(2048, 8))


def configure(bucket: OrderBucket, dtype: torch.dtype) -> Config:
    """Chooses eight elements a thread, which in 16 bits are one access of 16 bytes."""
    return CONFIGS[0] if bucket.H <= 512 or bucket.T <= 64 else CONFIGS[1]


def configure_backward(bucket: OrderBucket, dtype: torch.dtype) -> Config:
    """Chooses long steps of long rows: 32768 rows of 7168 take 437 us, and 495 in steps of 1024, which 65536 of 2048
    take best; steps of 4096 take 393 and spill where rows are odd (H100, 2026-11).
    """
    return LONG[2] if bucket.H > 4096 else configure(bucket, dtype)


def candidates(bucket: OrderBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return (*CONFIGS, Config(2048, 4), Config(2048, 8), Config(4096, 8))


@triton.jit
def _combine_kernel(y, x, weights, positions, N, stride_x, K: tl.constexpr, BLOCK_N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(positions + token * K + j).to(tl.int64)
        weight = tl.where(row >= 0, tl.load(weights + token * K + j).to(tl.float32), 0.0)
        row_x = tl.load(x + row * stride_x + offs_n, mask=(offs_n < N) & (row >= 0), other=0.0)
        acc += weight * row_x.to(tl.float32)
    tl.store(y + token * N + offs_n, acc.to(y.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _backward_kernel(
    dx, dweights, dy, x, weights, slots, positions, N, stride_dy, stride_x, K: tl.constexpr, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for j in range(K):
        row = tl.load(positions + token * K + j).to(tl.int64)
        weight = tl.load(weights + token * K + j).to(tl.float32)
        acc = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, N, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = (offs_n < N) & (row >= 0)
            row_dy = tl.load(dy + token * stride_dy + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
            row_x = tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32)
            acc += row_x * row_dy
            tl.store(dx + row * N + offs_n, (weight * row_dy).to(dx.dtype.element_ty), mask=mask)
        tl.store(dweights + token * K + j, tl.sum(acc, 0).to(dweights.dtype.element_ty))
    if any_dropped(row_of_numbers(slots, token, K), positions, K):
        for start in range(0, N, BLOCK_N):
            zero_dropped(dx, slots, positions, token, start + tl.arange(0, BLOCK_N), N, N, K)


_combine = TritonKernel(_combine_kernel)
_backward = TritonKernel(_backward_kernel)


def why_not(args: MoeUnpermuteArgs | MoeUnpermuteBackwardArgs) -> str | None:
    if args.positions.shape[1] > MOST_CHOSEN:
        return f"takes k up to {MOST_CHOSEN}"
    return no_float64(*args)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MoeUnpermuteArgs, config: Config) -> None:
    x, positions = as_rows(args.x), args.positions.contiguous()
    tokens, k = positions.shape
    columns = x.shape[1]
    _combine(
        (tokens, triton.cdiv(columns, config.block_n)),
        (outs[0], x, args.weights.contiguous(), positions, columns, x.stride(0)),
        (k, config.block_n),
        num_warps=config.num_warps,
    )


@register_kernel(
    BACKWARD, configure=configure_backward, config_type=Config, configs=LONG, candidates=candidates, why_not=why_not
)
def launch_backward(outs: tuple[Tensor, Tensor], args: MoeUnpermuteBackwardArgs, config: Config) -> None:
    dy, x, positions = as_rows(args.dy), as_rows(args.x), args.positions.contiguous()
    tokens, k = positions.shape
    _backward(
        (tokens,),
        (
            *outs, dy, x, args.weights.contiguous(), args.slots.contiguous(), positions, x.shape[1], dy.stride(0),
            x.stride(0),
        ),
        (k, config.block_n),
        num_warps=config.num_warps,
    )  # fmt: skip
