"""apply_penalties in Triton: a program takes a part of one row, element by element.

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


CONFIGS = (Config(1024, 4), Config(2048, 4), Config(4096, 8))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Chooses eight tokens a thread, 16 bytes in bf16.  Unmeasured."""
    return CONFIGS[0]


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _penalties_kernel(
    y, x, counts, prompt, bias, repetitions, presences, frequencies,  # all (M, N) but the last three, (M,)
    repetition, presence, frequency, N, parts, stride_x,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, HAS_R: tl.constexpr, HAS_P: tl.constexpr, HAS_F: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = r(x) - frequency * count - presence * (count > 0) + bias."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    r = tl.load(repetitions + row) if HAS_R else repetition
    p = tl.load(presences + row) if HAS_P else presence
    f = tl.load(frequencies + row) if HAS_F else frequency
    logits = tl.load(x + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    count = tl.load(counts + row * N + offs, mask=mask, other=0)
    present = count > 0
    if PROMPT:
        present = present | (tl.load(prompt + row * N + offs, mask=mask, other=0) != 0)
    result = tl.where(
        present, tl.where(logits > 0, tl.div_rn(logits, tl.full((BLOCK,), r, tl.float32)), logits * r), logits
    )
    result = result - f * count.to(tl.float32) - tl.where(count > 0, p, 0.0)
    if BIAS:
        result += tl.load(bias + row * N + offs, mask=mask, other=0.0)
    tl.store(y + row * N + offs, result.to(y.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_penalties_kernel)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS[:1], candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor], args: ApplyPenaltiesArgs, config: Config) -> None:
    x = as_rows(args.logits)
    m, n = x.shape
    parts = triton.cdiv(n, config.block)
    optional = (args.prompt, args.bias, args.repetitions, args.presences, args.frequencies)
    counts = args.counts.contiguous()
    tensors = tuple(counts if t is None else t.contiguous() for t in optional)  # absent ones are not read
    _kernel(
        (m * parts,),
        (outs[0], x, counts, *tensors, args.repetition, args.presence, args.frequency, n, parts, x.stride(0)),
        (*(t is not None for t in optional), config.block),
        num_warps=config.num_warps,
    )
