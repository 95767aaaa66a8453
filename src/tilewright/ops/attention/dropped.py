"""Dropout of attention's probabilities: which of them stay, as a function of seed, offset, batch, head, query and key.

Philox 4x32-10 with key `seed` and counter (batch, head, offset), 64 bits of offset, gives a head four words
r0 .. r3.  Those are the key (r0, r1) and half of the counter (j & ~8, i & ~8, r2, r3) of query i and key j.  Philox
permutes the counters of a key, so no two heads and offsets of a seed share r0 .. r3.  Its word 2 * bit 3 of i + bit 3
of j, of four, drops the probability if it is below p * 2^32.  The places i and j are those in q and k: no tile, mask,
length or other row of the batch is a part of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.philox import MASK, last_dropped, philox, philox_of_words, scale_of

_BIT = 8


class Dropout(NamedTuple):
    """What is dropped.   seed: () int64   offset: () int64, None: 0   p: the probability."""

    seed: Tensor
    offset: Tensor | None
    p: float

    @property
    def last(self) -> int:
        """The largest of the 31-bit random numbers that drop a probability; -1 where none does."""
        return last_dropped(self.p)

    @property
    def scale(self) -> float:
        """1 / (1 - p)."""
        return scale_of(self.p)


def kept(dropout: Dropout, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """bool (B, H, queries, keys): which probabilities stay.   queries, keys: (n,) int64, places in q and k."""
    device = queries.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    offset = zero if dropout.offset is None else dropout.offset
    b, h = torch.arange(batch, device=device)[:, None], torch.arange(heads, device=device)
    r0, r1, c2, c3 = (
        word[..., None, None]
        for word in philox(dropout.seed, b + zero * h, h + zero * b, offset & MASK, (offset >> 32) & MASK)
    )
    i, j = queries[:, None], keys
    w00, w01, w10, w11 = philox_of_words((r0, r1), j & ~_BIT, i & ~_BIT, c2, c3)
    late_key = (j & _BIT) > 0
    word = torch.where((i & _BIT) > 0, torch.where(late_key, w11, w10), torch.where(late_key, w01, w00))
    return (word >> 1) > dropout.last
