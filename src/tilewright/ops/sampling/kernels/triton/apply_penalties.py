"""apply_penalties in Triton: a program takes a part of the rows, element by element.

Rows that follow each other in memory are one run, whose blocks begin at whole vectors whatever N is, and meet at most
two rows; other rows have blocks of their own.

Traffic: logits and counts read, logits written, a byte more an element for the prompt and four for a bias; 128 x 131072
in bf16 with a prompt, 151 MB, cannot take less than 35 us at 4.3 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.rows import RowsBucket, as_rows, no_float64
from tilewright.ops.sampling.apply_penalties import FORWARD, ApplyPenaltiesArgs


class Config(NamedTuple):
    """block: tokens of a program."""

    block: int
    num_warps: int


_FEW = 1 << 17  # elements that give an H200's multiprocessors few blocks
CONFIGS = (Config(256, 8), Config(512, 4), Config(1024, 4), Config(2048, 4), Config(4096, 8))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """One token a thread for a row or two, else four: one row of 50257 takes 1.45 us, 1.81 with four; 64 rows of 151936
    19.4, and by the row 19.3, 19.9 with eight (H200, 2026-11).
    """
    return CONFIGS[bucket.M * bucket.N >= _FEW]


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _of_rows(values, row, second, last):  # values: (M,)
    """Value of each element of a block: that of `row`, or of the next where `second`."""
    return tl.where(second, tl.load(values + tl.minimum(row + 1, last)), tl.load(values + row))


@triton.jit
def _penalties_kernel(
    y, x, counts, prompt, bias, repetitions, presences, frequencies,  # all (M, N) but the last three, (M,)
    repetition, presence, frequency, M, N, parts, stride_x,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, HAS_R: tl.constexpr, HAS_P: tl.constexpr, HAS_F: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # RUN: all rows are one run of fewer than 2^31 elements, and BLOCK <= N
    """y = r(x) - frequency * count - presence * (count > 0) + bias."""
    if RUN:
        start = tl.program_id(0) * BLOCK
        offs = start + tl.arange(0, BLOCK)
        x_offs = offs
        row, mask = start // N, offs < M * N
        second = offs >= (row + 1) * N
    else:
        row = (tl.program_id(0) // parts).to(tl.int64)
        columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
        offs, x_offs, mask = row * N + columns, row * stride_x + columns, columns < N
        second = tl.zeros((BLOCK,), tl.int1)
    r = _of_rows(repetitions, row, second, M - 1) if HAS_R else tl.full((BLOCK,), repetition, tl.float32)
    p = _of_rows(presences, row, second, M - 1) if HAS_P else presence
    f = _of_rows(frequencies, row, second, M - 1) if HAS_F else frequency
    logits = tl.load(x + x_offs, mask=mask, other=0.0).to(tl.float32)
    count = tl.load(counts + offs, mask=mask, other=0)
    present = count > 0
    if PROMPT:
        present = present | (tl.load(prompt + offs, mask=mask, other=0) != 0)
    result = tl.where(present, tl.where(logits > 0, tl.div_rn(logits, r), logits * r), logits)
    result = result - f * count.to(tl.float32) - tl.where(count > 0, p, 0.0)
    if BIAS:
        result += tl.load(bias + offs, mask=mask, other=0.0)
    tl.store(y + offs, result.to(y.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_penalties_kernel)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:2], candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor], args: ApplyPenaltiesArgs, config: Config) -> None:
    x = as_rows(args.logits)
    m, n = x.shape
    run = (m == 1 or x.stride(0) == n) and config.block <= n and x.numel() < (1 << 31) - config.block
    parts = triton.cdiv(n, config.block)
    programs = triton.cdiv(m * n, config.block) if run else m * parts
    optional = (args.prompt, args.bias, args.repetitions, args.presences, args.frequencies)
    counts = args.counts.contiguous()
    tensors = tuple(counts if t is None else t.contiguous() for t in optional)  # absent ones are not read
    _kernel(
        (programs,),
        (outs[0], x, counts, *tensors, args.repetition, args.presence, args.frequency, m, n, parts, x.stride(0)),
        (*(t is not None for t in optional), run, config.block),
        num_warps=config.num_warps,
    )
