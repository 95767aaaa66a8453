"""moe_permute in Triton: a program reads a token's row once and writes it k times; backwards it adds k rows.

Rows of dropped slots are zeroed by the programs that bear their number: row r by that of token r // k.
Traffic: T*H read, T*k*H written: 4096 tokens of 7168 in bf16, k = 8, are 528 MB and cannot take less than 150 us, as
fast as an H200 writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.moe.moe_permute import BACKWARD, FORWARD, MoePermuteArgs, MoePermuteBackwardArgs, OrderBucket
from tilewright.ops.rows import as_rows, no_float64

MOST_CHOSEN = 64


class Config(NamedTuple):
    """block_n: columns of a program."""

    block_n: int
    num_warps: int


CONFIGS = (Config(512, 2), Config(1024, 4))


def configure(bucket: OrderBucket, dtype: torch.dtype) -> Config:
    """Chooses eight elements a thread, which in 16 bits are one access of 16 bytes."""
    return CONFIGS[0] if bucket.H <= 512 or bucket.T <= 64 else CONFIGS[1]


def candidates(bucket: OrderBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return (*CONFIGS, Config(256, 1), Config(256, 2), Config(512, 4), Config(2048, 4), Config(2048, 8), Config(4096, 8))


@triton.jit
def row_of_numbers(numbers, token, K: tl.constexpr):
    """The K numbers of a token, of slots or positions (T, K).  No load waits for another one."""
    row = ()
    for j in tl.static_range(K):
        row += (tl.load(numbers + token * K + j),)
    return row


@triton.jit
def any_dropped(row_slots, positions, K: tl.constexpr):
    """Whether one of K slots is dropped."""
    least = 0
    for j in tl.static_range(K):
        least = tl.minimum(least, tl.load(positions + row_slots[j]))
    return least < 0


@triton.jit
def zero_dropped(y, slots, positions, token, offs_n, N, stride, K: tl.constexpr):
    """Zeros in those of rows token * K .. that belong to dropped slots."""
    for j in range(K):
        row = token * K + j
        if tl.load(positions + tl.load(slots + row)) < 0:
            tl.store(y + row * stride + offs_n, tl.zeros(offs_n.shape, y.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _permute_kernel(y, x, slots, positions, N, stride_x, K: tl.constexpr, BLOCK_N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Loads that depend on no other come first: after a store the compiler leaves them where they are
    row_slots, rows = row_of_numbers(slots, token, K), row_of_numbers(positions, token, K)
    row_x = tl.load(x + token * stride_x + offs_n, mask=offs_n < N, other=0.0)
    for j in tl.static_range(K):
        tl.store(y + rows[j].to(tl.int64) * N + offs_n, row_x, mask=(offs_n < N) & (rows[j] >= 0))
    if any_dropped(row_slots, positions, K):
        zero_dropped(y, slots, positions, token, offs_n, N, N, K)


@triton.jit
def _sum_kernel(dx, dy, positions, N, stride_dy, K: tl.constexpr, BLOCK_N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(positions + token * K + j).to(tl.int64)
        acc += tl.load(dy + row * stride_dy + offs_n, mask=(offs_n < N) & (row >= 0), other=0.0).to(tl.float32)
    tl.store(dx + token * N + offs_n, acc.to(dx.dtype.element_ty), mask=offs_n < N)


_permute = TritonKernel(_permute_kernel)
_sum = TritonKernel(_sum_kernel)


def why_not(args: MoePermuteArgs | MoePermuteBackwardArgs) -> str | None:
    if args.positions.shape[1] > MOST_CHOSEN:
        return f"takes k up to {MOST_CHOSEN}"
    return no_float64(*args)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MoePermuteArgs, config: Config) -> None:
    x = as_rows(args.x)
    tokens, columns = x.shape
    _permute(
        (tokens, triton.cdiv(columns, config.block_n)),
        (outs[0], x, args.slots.contiguous(), args.positions.contiguous(), columns, x.stride(0)),
        (args.positions.shape[1], config.block_n),
        num_warps=config.num_warps,
    )


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch_backward(outs: tuple[Tensor], args: MoePermuteBackwardArgs, config: Config) -> None:
    dy, positions = as_rows(args.dy), args.positions.contiguous()
    tokens, k = positions.shape
    columns = dy.shape[1]
    _sum(
        (tokens, triton.cdiv(columns, config.block_n)),
        (outs[0], dy, positions, columns, dy.stride(0)),
        (k, config.block_n),
        num_warps=config.num_warps,
    )
