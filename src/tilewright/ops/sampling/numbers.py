"""The arithmetic of sampling, in plain torch: every step has one right result, so all backends draw the same token.

Weights are integers: w = floor(2^40 * 2^-t) of t = (max - logit) * log2(e) / temperature, where 2^-t is a polynomial in
integers and t is two float32 roundings.  Sums of integers do not depend on their order, so a row may be divided among
programs in any way.  A draw is one random integer u below the sum Z: the token at which the running sum passes u.
Weights below 2^-40 of the largest are 0, and so is what they would add: at most 2^-18 of Z for 2^22 tokens.
"""

import torch
from torch import Tensor

UNIT = 40
"""A weight of 2^UNIT is the likeliest token's."""
MAX_TOKENS = 1 << 22
"""Up to this size of the vocabulary a sum of weights is below 2^62, as the product in `below` needs."""
LOG2E = 1.4426950408889634
LARGEST = 3.4028234663852886e38
STEEPEST = 2.0**100
"""log2(e) / temperature is at most this: lower temperatures than 1e-30 count as that."""
POLYNOMIAL = (2977044080, 1031757278, 238337602, 41155296, 5486705, 472172)
"""1 - 2^-f = f (c0 - f (c1 - ...)) for f in [0, 1): least error, 1.5e-9, of degree 6; in units of 2^-32."""
NOTHING = -2139095041
"""The key of -inf: tokens above it may be drawn."""
DRAW, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams of random numbers at one position of one seed: of `sample`, and of the two steps of `verify_chain`."""


def clean(logits: Tensor) -> Tensor:
    """Logits as float32, with NaN as -inf and +inf as the largest number."""
    x = logits.to(torch.float32)
    return torch.where(x.isnan(), -torch.inf, x).clamp(max=LARGEST)


def ordered(x: Tensor) -> Tensor:
    """Integers in the order of float32 `x`, with one for 0.0 and -0.0."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def slopes(temperatures: Tensor) -> Tensor:
    """log2(e) / temperature in float32, for temperatures that are not 0."""
    t = torch.where(temperatures > 0, temperatures, 1.0)
    return (torch.full_like(t, LOG2E) / t).clamp(max=STEEPEST)


def weights(x: Tensor, slope: Tensor) -> Tensor:
    """int64 weights of clean logits `x` (B, V); `slope` (B,)."""
    largest = x.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    t = ((largest - x) * slope[:, None]).clamp(max=64.0)
    fixed = (t * 2.0**24).to(torch.int64)
    n, f = fixed >> 24, (fixed & 0xFFFFFF) << 7
    y = torch.full_like(f, POLYNOMIAL[-1])
    for coefficient in reversed(POLYNOMIAL[:-1]):
        y = coefficient - ((f * y) >> 31)
    return torch.where(n <= UNIT, (((1 << 32) - ((f * y) >> 31)) << (UNIT - 32)) >> n.clamp(max=UNIT), 0)


def share(total: Tensor, p: Tensor) -> Tensor:
    """ceil(p * total) with p rounded down to a multiple of 2^-24 of at least 2^-24; p >= 1, or NaN, gives `total`."""
    parts = (torch.where(p < 1, p, 1.0).clamp(min=0.0) * 2.0**24).to(torch.int64).clamp(min=1)
    return (total >> 24) * parts + (((total & 0xFFFFFF) * parts + 0xFFFFFF) >> 24)


def least(min_p: Tensor) -> Tensor:
    """The smallest weight that min_p leaves."""
    return (torch.where(min_p > 0, min_p, 0.0).clamp(max=1.0) * 2.0**UNIT).to(torch.int64)


def philox(seeds: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Two random integers of 31 bits for each (seed, position): the first words of Philox, without their last bits."""
    first, second, _, _ = philox_words(seeds, positions, torch.full_like(positions, stream))
    return first >> 1, second >> 1


def philox_words(seeds: Tensor, positions: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random integers of 32 bits for each position: Philox 4x32 with 10 rounds, key seed, counter (position,
    stream).
    """
    mask = 0xFFFFFFFF
    k0, k1 = seeds & mask, (seeds >> 32) & mask
    c0, c1 = positions & mask, (positions >> 32) & mask
    c2, c3 = streams & mask, torch.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # their 64 bits are right, as signed numbers too
        c0, c1, c2, c3 = ((b >> 32) & mask) ^ c1 ^ k0, b & mask, ((a >> 32) & mask) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def below(random: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
    """floor(r * total / 2^62) of the 62 bits r: an integer below total < 2^62; any has probability 1 / total up to
    2^-62.
    """
    high, low = random
    total_high, total_low = total >> 31, total & 0x7FFFFFFF
    return high * total_high + ((high * total_low + low * total_high + ((low * total_low) >> 31)) >> 31)


def draw(w: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum of `w` (B, V) is above `u` (B,); -1 where all weights are 0."""
    running = w.cumsum(-1)
    tokens = (running <= u[:, None]).sum(-1)
    return torch.where(running[:, -1] > 0, tokens, -1)
