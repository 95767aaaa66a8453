"""sample in Triton: maxima of the parts of rows, thresholds (`search`), masses of the parts, and one draw a row.

All sums are integers, so rows may be divided into parts of any size.  The draw takes the part, then the token, at which
the running sum passes a random integer.  Without filters the logits are read twice and once more in one part;
each search reads them `rounds` + 2 times, from L2 where 60 MB hold them.  128 x 131072 float32, 67 MB, cannot take less
than 15 us at 4.4 TB/s.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.rows import as_rows, no_float64
from tilewright.ops.sampling.kernels.triton import search
from tilewright.ops.sampling.kernels.triton.numbers import (
    LOG2E,
    NOTHING,
    below,
    least,
    load_clean,
    ordered,
    random62,
    slope,
    value,
    weights,
)
from tilewright.ops.sampling.kernels.triton.search import parameter, row_maximum, row_total
from tilewright.ops.sampling.sample import FORWARD, SampleArgs, SampleBucket


class Config(NamedTuple):
    """block: tokens of a program.   rounds: of pivots, before the rest is a list."""

    block: int
    rounds: int
    num_warps: int


CONFIGS = (Config(1024, 2, 4), Config(4096, 2, 8), Config(1024, 0, 4))
SPACE = tuple(Config(block, rounds, block // 512) for block in (1024, 2048, 4096) for rounds in (0, 1, 2, 3))


def configure(bucket: SampleBucket, dtype: torch.dtype) -> Config:
    """Chooses short parts for a few rows, which then fill the GPU; a short row is a list at once.  Unmeasured."""
    if bucket.N <= 8192:
        return CONFIGS[2]
    return CONFIGS[0] if bucket.M * bucket.N <= 1 << 19 else CONFIGS[1]


def candidates(bucket: SampleBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return SPACE if bucket.filters else SPACE[::4]


@triton.jit
def _maximum_kernel(maxima, counters, x, N, parts, stride_x, BLOCK: tl.constexpr):  # counters: (2, M)
    """The largest key of one part of a row; clears the lengths of the row's lists."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(maxima + tl.program_id(0), tl.max(ordered(load_clean(x + row * stride_x, offs, offs < N)), 0))
    rows = tl.num_programs(0) // parts
    tl.store(counters + row, 0, mask=part == 0)
    tl.store(counters + rows + row, 0, mask=part == 0)


@triton.jit
def _kept_weights(logits, highest, t, threshold, smallest):
    """Weights, 0 for tokens that the filters drop."""
    key = ordered(logits)
    w = weights(logits, value(highest), slope(t))
    allowed = (key >= tl.where(t > 0, threshold, highest)) & (w >= smallest) & (highest > NOTHING)
    return tl.where(allowed, w, 0)


@triton.jit
def _mass_kernel(
    masses, model_masses, thresholds, maxima, x, temperatures, min_ps,  # masses, model_masses: (M, parts)
    temperature, min_p, N, parts, stride_x,
    HAS_T: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_MIN_P: tl.constexpr, MODEL: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the weights that are left of one part.   MODEL: and of all weights at temperature 1."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    t = parameter(temperatures, temperature, row, HAS_T)
    smallest = least(parameter(min_ps, min_p, row, HAS_MIN_P))
    threshold = tl.load(thresholds + row) if HAS_THRESHOLD else NOTHING + 1
    highest = row_maximum(maxima, row, parts, PARTS)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    logits = load_clean(x + row * stride_x, offs, offs < N)
    tl.store(masses + tl.program_id(0), tl.sum(_kept_weights(logits, highest, t, threshold, smallest), 0))
    if MODEL:
        w = weights(logits, tl.where(highest > NOTHING, value(highest), 0.0), LOG2E)
        tl.store(model_masses + tl.program_id(0), tl.sum(w, 0))


@triton.jit
def _draw_kernel(
    tokens, logprobs, masses, model_masses, thresholds, maxima, x, seeds, positions, temperatures, min_ps,
    temperature, min_p, N, parts, stride_x,
    HAS_T: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_MIN_P: tl.constexpr, LOGPROBS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at which the running sum of a row passes a random integer below the sum."""
    row = tl.program_id(0).to(tl.int64)
    t = parameter(temperatures, temperature, row, HAS_T)
    smallest = least(parameter(min_ps, min_p, row, HAS_MIN_P))
    threshold = tl.load(thresholds + row) if HAS_THRESHOLD else NOTHING + 1
    highest = row_maximum(maxima, row, parts, PARTS)
    x += row * stride_x

    # The random integer
    total = row_total(masses, row, parts, PARTS)
    high, low = random62(tl.load(seeds + row), tl.load(positions + row), 0)
    u = tl.where(t > 0, below(high, low, total), 0)

    # The part, then the token
    offs_p = tl.arange(0, PARTS)
    mass = tl.load(masses + row * parts + offs_p, mask=offs_p < parts, other=0)
    part = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= u).to(tl.int32), 0), parts - 1)
    u -= tl.sum(tl.where(offs_p < part, mass, 0), 0)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    w = _kept_weights(load_clean(x, offs, offs < N), highest, t, threshold, smallest)
    token = part * BLOCK + tl.sum((tl.cumsum(w, 0) <= u).to(tl.int32), 0)
    tl.store(tokens + row, tl.where(total > 0, token, -1).to(tl.int64))

    # Its log-probability
    if LOGPROBS > 0:
        drawn = load_clean(x, token, total > 0)
        if LOGPROBS == 1:
            w_drawn = weights(drawn, value(highest), slope(t))
            logprob = tl.where(t > 0, tl.log(tl.div_rn(w_drawn.to(tl.float32), total.to(tl.float32))), 0.0)
        else:
            model_mass = row_total(model_masses, row, parts, PARTS).to(tl.float32)
            logprob = -(value(highest) - drawn) - tl.log(model_mass * 9.094947017729282e-13)  # 2^-40
        tl.store(logprobs + row, tl.where(total > 0, logprob, float("-inf")))


# a fused product and sum would round a logit's distance from the maximum in another way
_maximum = TritonKernel(_maximum_kernel, enable_fp_fusion=False)
_mass = TritonKernel(_mass_kernel, enable_fp_fusion=False)
_draw = TritonKernel(_draw_kernel, enable_fp_fusion=False)
_round = TritonKernel(search._round_kernel, enable_fp_fusion=False)
_gather = TritonKernel(search._gather_kernel, enable_fp_fusion=False)
_finish = TritonKernel(search._finish_kernel, enable_fp_fusion=False)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor, Tensor], args: SampleArgs, config: Config) -> None:
    row = Rows(args, config)
    threshold, masses, model_masses = row.kept()
    _draw(
        (row.m,),
        (outs[0], outs[1], masses, model_masses, row.given(threshold), row.maxima, row.x, args.seeds.contiguous(),
         args.positions.contiguous(), row.temperatures, row.given(args.min_ps), args.temperature, args.min_p, row.n,
         row.parts, row.x.stride(0)),
        (row.has_t, threshold is not None, args.min_ps is not None, args.logprobs, row.padded, config.block),
        num_warps=config.num_warps,
    )  # fmt: skip


class Rows:
    """The launches of one call, and the memory between them."""

    def __init__(self, args: SampleArgs, config: Config) -> None:
        self.args, self.config = args, config
        self.x = as_rows(args.logits)
        self.m, self.n = self.x.shape
        self.parts = triton.cdiv(self.n, config.block)
        self.padded = triton.next_power_of_2(self.parts)
        self.has_t, self.temperatures = args.temperatures is not None, self.given(args.temperatures)
        self.maxima = self._scratch((self.m, self.parts), torch.int32)
        self.counters = self._scratch((2, self.m), torch.int32)
        self.keys: Tensor | None = None

    def _scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return scratch(shape, dtype, self.x.device)

    def given(self, tensor: Tensor | None) -> Tensor:
        """A tensor that a kernel may be given; where there is none, another that it does not read."""
        return self.args.seeds if tensor is None else tensor.contiguous()

    def kept(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The smallest key (M,) that top-k and top-p leave; sums (M, parts) of weights that all filters leave, and of
        all at temperature 1.
        """
        args, (block, _, num_warps), values = self.args, self.config, (self.maxima, self.counters, self.x)
        grid = (self.m * self.parts,)
        _maximum(grid, (*values, self.n, self.parts, self.x.stride(0)), (block,), num_warps=num_warps)
        threshold = None
        if args.top_ks is not None or args.top_k > 0:
            threshold = self.search(0, None, None)
        if args.top_ps is not None or args.top_p < 1:
            masses, _ = self.masses(threshold, None, 0.0, False)
            threshold = self.search(1, threshold, masses)
        return threshold, *self.masses(threshold, args.min_ps, args.min_p, args.logprobs == 2)

    def masses(
        self, threshold: Tensor | None, min_ps: Tensor | None, min_p: float, model: bool
    ) -> tuple[Tensor, Tensor]:
        """Sums of the parts, and those at temperature 1."""
        masses = self._scratch((self.m, self.parts), torch.int64)
        model_masses = self._scratch((self.m, self.parts), torch.int64) if model else masses
        _mass(
            (self.m * self.parts,),
            (masses, model_masses, self.given(threshold), self.maxima, self.x, self.temperatures, self.given(min_ps),
             self.args.temperature, min_p, self.n, self.parts, self.x.stride(0)),
            (self.has_t, threshold is not None, min_ps is not None, model, self.padded, self.config.block),
            num_warps=self.config.num_warps,
        )  # fmt: skip
        return masses, model_masses

    def search(self, which: int, floors: Tensor | None, masses: Tensor | None) -> Tensor:
        """Thresholds (M,) of top-k (0) or top-p (1)."""
        args, (block, rounds, num_warps) = self.args, self.config
        amounts, amount = ((args.top_ks, args.top_k), (args.top_ps, args.top_p))[which]
        if self.keys is None:
            self.keys = self._scratch((self.m, self.n), torch.int32)
        thresholds = self._scratch((self.m,), torch.int32)
        brackets = self._scratch((self.m, rounds + 1, 3), torch.int64)
        pivots = self._scratch((self.m, max(rounds, 1), 7), torch.int64)
        sums = self._scratch((self.m, max(rounds, 1), 7, self.parts), torch.int64)
        counters = self.counters[which]
        tensors: tuple[Any, ...] = (self.given(masses), self.given(floors), self.maxima)
        parameters = (self.temperatures, self.given(amounts), args.temperature, amount, self.n, self.parts)
        flags = (which == 1, self.has_t, amounts is not None, floors is not None)
        grid = (self.m * self.parts,)
        for number in range(rounds):
            values = (brackets, pivots, sums, *tensors, self.x, *parameters, self.x.stride(0))
            _round(grid, values, (*flags, number, rounds, self.padded, block), num_warps=num_warps)
        values = (self.keys, counters, brackets, pivots, sums, *tensors, self.x, *parameters, self.x.stride(0))
        _gather(grid, values, (*flags, rounds, self.padded, block), num_warps=num_warps)
        values = (thresholds, self.keys, counters, brackets, *tensors, *parameters)
        _finish((self.m,), values, (*flags, rounds, self.padded, 2048), num_warps=8)
        return thresholds
