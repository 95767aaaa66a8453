"""Random integers that are a function of a key and a counter: Philox 4x32 with 10 rounds, in plain torch.

Triton's `tl.philox` is the same function.   Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from torch import Tensor

MASK = 0xFFFFFFFF
"""The low 32 bits of an int64."""


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random integers of 32 bits, in int64, for each counter (c0, c1, c2, c3) of 32-bit words; the key is the
    int64 seed.
    """
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # their 64 bits are right, as signed numbers too
        c0, c1, c2, c3 = ((b >> 32) & MASK) ^ c1 ^ k0, b & MASK, ((a >> 32) & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3
