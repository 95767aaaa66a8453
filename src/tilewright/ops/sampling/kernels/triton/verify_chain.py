"""verify_chain in Triton: one program a request counts the accepted drafts, then the parts of a row are summed, then
one program a request draws.

Only the two rows of the first rejected draft are read, p and q: 8 V bytes a request; 32 requests of 131072 tokens, 34
MB, cannot take less than 8 us at 4.4 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.sampling.kernels.triton.numbers import below, random62
from tilewright.ops.sampling.kernels.triton.search import row_total
from tilewright.ops.sampling.verify_chain import FORWARD, VerifyChainArgs, VerifyChainBucket

ONE = tl.constexpr(1 << 40)


class Config(NamedTuple):
    """block: tokens of a program."""

    block: int
    num_warps: int


CONFIGS = (Config(1024, 4), Config(4096, 8))


def configure(bucket: VerifyChainBucket, dtype: torch.dtype) -> Config:
    """Chooses short parts for a few requests, which then fill the GPU.  Unmeasured."""
    return CONFIGS[0] if bucket.M * bucket.N <= 1 << 19 else CONFIGS[1]


def candidates(bucket: VerifyChainBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _fixed(p):
    """A probability as a multiple of 2^-40."""
    return (tl.where(p > 0.0, tl.where(p < 1.0, p, 1.0), 0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _accept_kernel(tokens, accepted, p, q, drafts, seeds, positions, N, n, CERTAIN: tl.constexpr):
    """Count the accepted drafts of a request, and write them."""
    b = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    count = 0
    for i in range(n):
        token = tl.load(drafts + b * n + i)
        inside = (token >= 0) & (token < N)
        p_token = _fixed(tl.load(p + (b * (n + 1) + i) * N + token, mask=inside, other=0.0))
        if CERTAIN:
            q_token = tl.full((), ONE, tl.int64)
        else:
            q_token = _fixed(tl.load(q + (b * n + i) * N + token, mask=inside, other=0.0))
        high, low = random62(seed, position + i, 1)
        accepts = inside & (below(high, low, q_token) < p_token) & (count == i)
        count += accepts.to(tl.int32)
        tl.store(tokens + b * (n + 1) + i, tl.where(accepts, token, -1))
    tl.store(tokens + b * (n + 1) + n, tl.full((), -1, tl.int64))
    tl.store(accepted + b, count)


@triton.jit
def _weights(p, q, drafts, b, count, offs, N, n, CERTAIN: tl.constexpr):
    """(p, max(p - q, 0)) of the row after `count` accepted drafts."""
    mask = offs < N
    target = _fixed(tl.load(p + (b * (n + 1) + count) * N + offs, mask=mask, other=0.0))
    token = tl.load(drafts + b * n + count, mask=count < n, other=-1)
    inside = (token >= 0) & (token < N)
    if CERTAIN:
        draft = tl.where(inside & (offs == token), ONE, tl.zeros_like(target))
    else:
        draft = _fixed(tl.load(q + (b * n + count) * N + offs, mask=mask & inside, other=0.0))
    return target, tl.maximum(target - draft, 0)


@triton.jit
def _mass_kernel(masses, residuals, accepted, p, q, drafts, N, n, parts, CERTAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over one part of the row after the accepted drafts."""
    b, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    target, residual = _weights(p, q, drafts, b, tl.load(accepted + b), offs, N, n, CERTAIN)
    tl.store(masses + tl.program_id(0), tl.sum(target, 0))
    tl.store(residuals + tl.program_id(0), tl.sum(residual, 0))


@triton.jit
def _last_kernel(
    tokens, accepted, masses, residuals, p, q, drafts, seeds, positions, N, n, parts,
    CERTAIN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token after the accepted drafts: that at which the running sum passes a random integer."""
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(accepted + b)
    has_residual = row_total(residuals, b, parts, PARTS) > 0
    offs_p = tl.arange(0, PARTS)
    mass = tl.load(masses + b * parts + offs_p, mask=offs_p < parts, other=0)
    mass = tl.where(has_residual, tl.load(residuals + b * parts + offs_p, mask=offs_p < parts, other=0), mass)
    total = tl.sum(mass, 0)
    high, low = random62(tl.load(seeds + b), tl.load(positions + b) + count, 2)
    u = below(high, low, total)
    part = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= u).to(tl.int32), 0), parts - 1)
    u -= tl.sum(tl.where(offs_p < part, mass, 0), 0)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    target, residual = _weights(p, q, drafts, b, count, offs, N, n, CERTAIN)
    running = tl.cumsum(tl.where(has_residual, residual, target), 0)
    token = part * BLOCK + tl.sum((running <= u).to(tl.int32), 0)
    tl.store(tokens + b * (n + 1) + count, tl.where(total > 0, token, -1).to(tl.int64))


_accept = TritonKernel(_accept_kernel)
_mass = TritonKernel(_mass_kernel)
_last = TritonKernel(_last_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: VerifyChainArgs, config: Config) -> None:
    p, drafts, seeds, positions = (t.contiguous() for t in args[:4])
    certain = args.draft_probs is None
    q = p if args.draft_probs is None else args.draft_probs.contiguous()
    b, steps, vocabulary = p.shape
    n = steps - 1
    block, num_warps = config
    parts = triton.cdiv(vocabulary, block)
    masses, residuals = (scratch((b, parts), torch.int64, p.device) for _ in range(2))
    _accept((b,), (*outs, p, q, drafts, seeds, positions, vocabulary, n), (certain,), num_warps=1)
    _mass(
        (b * parts,),
        (masses, residuals, outs[1], p, q, drafts, vocabulary, n, parts),
        (certain, block),
        num_warps=num_warps,
    )
    _last(
        (b,),
        (*outs, masses, residuals, p, q, drafts, seeds, positions, vocabulary, n, parts),
        (certain, triton.next_power_of_2(parts), block),
        num_warps=num_warps,
    )
