"""Stochastic rounding to bf16: up with the probability of the distance, so that the mean of the results is the value.

The sixteen bits that bf16 drops are added to as many random ones; the carry rounds up.  The random bits are those of
Philox for (seed, stream, place in memory): one word of four for each of four neighbours, of which a value uses half.
Streams 2 * step and 2 * step + 1 belong to one step of an optimizer.
"""

import torch
from torch import Tensor

from tilewright.ops.optim.memory import positions
from tilewright.ops.philox import MASK, philox


def random_words(like: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """32 random bits for each element of `like`, int64 of its shape."""
    place = positions(like)
    quad = place >> 2
    streams = (stream.to(torch.int64).view(()) & MASK).expand(like.shape)
    words = torch.stack(philox(seed.view(()), quad & MASK, (quad >> 32) & MASK, streams, torch.zeros_like(quad)))
    return words.gather(0, (place & 3)[None])[0]


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """float32 `x` as bf16, away from 0 where the sixteen bits that are dropped and the random `bits` have a carry."""
    raised = (x.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(x.isnan(), x, raised.view(torch.float32)).to(torch.bfloat16)
