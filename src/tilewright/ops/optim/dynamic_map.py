"""Numbers of 8 bits by the dynamic map of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021).

256 numbers in [-1, 1], or in [0, 1] for averages of squares: 0, 1, and the middles of equal cells of seven decades.
Decade i = 0 .. 6 is from 10^(i - 7) to 10^(i - 6), and has 2^i cells for each sign, or 2^(i + 1) without signs.  In
ascending order of the numbers, signed code 127 and unsigned code 0 are 0; code 255 is 1, and -1 has no code.

A block of 256 elements, in the order of a contiguous tensor, has one scale, its largest magnitude: a code stands for
its number times the scale.  The nearest number is chosen, of two equally near ones the larger magnitude, as float32
tells them apart.  A scale below 2^-126 is 0.  A block with a NaN or an infinity has it as its scale, and code 255
everywhere.

Every step below is one float32 operation, without fused multiplications and additions: kernels repeat them.  The
ordinal of a number is 2^e + k for cell k of the decade that has 2^e cells; that of 1 follows on the last.
"""

import torch
from torch import Tensor

BLOCK = 256
ZERO = {True: 127, False: 0}
"""Code of 0, with and without signs."""

TINY = 2.0**-126
FIRST_CELL = 0.2  # of the first cell of a decade is nearer to the last number of the decade before
ZERO_BELOW = {True: (0.275 + 0.8) / 0.9, False: 2 * (0.1625 + 0.8) / 0.9}
"""Half of the smallest number, as an ordinal with a fraction."""


def numbers(signed: bool, device: torch.device | None = None) -> Tensor:
    """(256,) float32: what each code stands for."""
    code, offset = torch.arange(256, device=device), 0 if signed else 1
    ordinal = (code - 127).abs() if signed else code + 1
    cells = torch.ones(256, device=device)
    for e in range(1, 7 + offset):
        cells = torch.where(ordinal >= 2**e, 2.0**e, cells)
    ten = torch.full_like(cells, 1e-6)
    for i in range(1, 7):
        ten = torch.where(ordinal >= 2 ** (i + offset), 10.0 ** (i - 6), ten)
    number = (0.9 * (ordinal.to(torch.float32) - cells + 0.5) / cells + 0.1) * ten
    number = torch.where(code == ZERO[signed], 0.0, torch.where(code == 255, 1.0, number))
    return torch.where(code < ZERO[signed], -number, number)


def dequantise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """float32 values of codes (n,) uint8 with scales (ceil(n / 256),)."""
    number = numbers(signed, codes.device)[codes.to(torch.int64)]
    return number * scales.to(torch.float32).repeat_interleave(BLOCK)[: len(codes)]


def quantise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes (n,) uint8, scales (ceil(n / 256),) float32) of float32 values (n,)."""
    n = len(values)
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scales = torch.where(scales < TINY, 0.0, scales)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    x = blocks.abs() * inverse[:, None]
    offset = 0 if signed else 1
    y = torch.full_like(x, torch.inf)
    for i in range(7):  # lines of decades, which are the lower the nearer the decade
        y = torch.minimum(y, x * (2.0 ** (i + offset) * 10.0 ** (6 - i) / 0.9) + 2.0 ** (i + offset) * 0.8 / 0.9)
    largest = 2 ** (7 + offset)
    floor = y.floor()
    ordinal = floor.nan_to_num(0.0).to(torch.int32)
    first = ((ordinal & (ordinal - 1)) == 0) & (ordinal > 2**offset) & (y - floor < FIRST_CELL)
    ordinal = ordinal - first.to(torch.int32)
    ordinal = torch.where(y < ZERO_BELOW[signed], offset, ordinal)
    ordinal = torch.where(y >= largest - 0.25, largest, ordinal)
    if signed:
        code = torch.where(blocks < 0, 127 - ordinal.clamp(max=127), 127 + ordinal)
    else:
        code = ordinal - 1
    code = torch.where(scales.isfinite()[:, None], code, 255)
    return code.to(torch.uint8).view(-1)[:n], scales


def to_codes(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes of the shape of `values`, contiguous, scales)."""
    codes, scales = quantise(values.to(torch.float32).reshape(-1), signed)
    return codes.view(values.shape), scales


def from_codes(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """float32 values of the shape of `codes`."""
    return dequantise(codes.reshape(-1), scales, signed).view(codes.shape)
