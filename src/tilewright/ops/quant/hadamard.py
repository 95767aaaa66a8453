"""Symmetric Hadamard matrices: entries 1 and -1, H = H^T and H H^T = n I, so that H / sqrt(n) is its own inverse.

    n      H
    2^k    Sylvester's: H[i, j] = (-1)^popcount(i & j)
    m 2^k  P_m (x) Sylvester's of 2^k, with m = 12, 20, 28, 36

P_m is Paley's second construction, m = 2 (q + 1) with q = 5, 9, 13, 17 and the field of q elements:

    P = C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]
    C = [[0, 1], [1, chi]],   chi[u, v] = 1 where u - v is a nonzero square, 0 where u = v, else -1

An element a + b i of the field of 9, i^2 = -1, has the number 3 a + b.  40 = 2 * 20 needs no matrix of its own.
Matrices of one order differ by permutations and signs: those of other libraries for 12, 20 and 28 are others.
Source: Paley, "On orthogonal matrices", 1933.
"""

from functools import cache

import torch
from torch import Tensor

LONGEST = 32768
SQUARES = {
    12: (5, (1, 4)),
    20: (9, (1, 2, 3, 6)),
    28: (13, (1, 3, 4, 9, 10, 12)),
    36: (17, (1, 2, 4, 8, 9, 13, 15, 16)),
}
"""(q, nonzero squares of the field of q elements) of each order m."""


def factor(n: int) -> int | None:
    """Returns m of n = m * 2^k, of the orders above or 1; None for a size that has no matrix here."""
    if n < 1:
        return None
    odd = n // (n & -n)
    m = 1 if odd == 1 else 4 * odd
    return m if (m == 1 or m in SQUARES) and n % m == 0 else None


def largest_block(n: int) -> int:
    """Returns the largest divisor of n >= 1 that has a matrix, at most 32768."""
    sizes = [m << k for m in (1, *SQUARES) for k in range(16) if m << k <= LONGEST]
    return max(size for size in sizes if n % size == 0)


def difference(u: int, v: int, q: int) -> int:
    """Returns u - v in the field of q elements."""
    return (u // 3 - v // 3) % 3 * 3 + (u - v) % 3 if q == 9 else (u - v) % q


@cache
def rows_of(m: int) -> tuple[tuple[int, ...], ...]:
    """Returns P_m, of an order above, as rows of 1 and -1."""
    q, squares = SQUARES[m]

    def entry(i: int, j: int) -> int:
        u, v, both = i // 2, j // 2, (i & 1) * (j & 1)
        if u == v:
            return 1 if i % 2 == j % 2 == 0 else -1
        is_square = u == 0 or v == 0 or difference(u - 1, v - 1, q) in squares
        return (1 if is_square else -1) * (1 - 2 * both)

    return tuple(tuple(entry(i, j) for j in range(m)) for i in range(m))


def transform(x: Tensor) -> Tensor:
    """Returns H x of the last dimension, whose size has a matrix, in x's dtype: sums and differences alone, which no
    setting of products and no autocast changes.
    """
    n = x.shape[-1]
    m = factor(n)
    assert m is not None, "checked"
    y = x if m == 1 else _small(x.unflatten(-1, (m, n // m)), m).flatten(-2)
    width = 1
    while width < n // m:
        low, high = y.unflatten(-1, (n // (2 * width), 2, width)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        width *= 2
    return y


def _small(x: Tensor, m: int) -> Tensor:
    """Returns P_m x of x (..., m, columns), in one step for each column of P_m."""
    rows = rows_of(m)
    places = torch.arange(m, device=x.device)  # signs are made on the device: a graph may capture this
    y = torch.zeros_like(x)
    for j in range(m):
        negative = sum(1 << i for i in range(m) if rows[i][j] < 0)
        sign = (1 - 2 * ((negative >> places) & 1)).to(x.dtype).unsqueeze(-1)  # (m, 1)
        y = y + x[..., j : j + 1, :] * sign
    return y
