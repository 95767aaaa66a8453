"""Numbers of e2m1, the nearest of them by search, and rows that reach far."""

from fractions import Fraction

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the OCP specification, table 6


def nearest(x, numbers):
    """The number of even index among the nearest to |x|; exact arithmetic."""
    distances = [abs(Fraction(abs(x)) - Fraction(number)) for number in numbers]
    least = min(distances)
    return min((i for i, d in enumerate(distances) if d == least), key=lambda i: i % 2)


def spread_values(rows, depth):
    """Rows over forty octaves, with zeros, ties and the ends of the range."""
    x = torch.randn(rows, depth) * torch.exp2(40 * torch.rand(rows, 1) - 20)
    x[0] = 0
    x[1, 1] = -0.0
    x[2] = torch.arange(depth) % 29 * 0.25 - 3.5
    return x
