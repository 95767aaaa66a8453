"""Random quantised weights."""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.weight_only import packing


def random_weight(
    n: int, k: int, bits: int, scale_dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns (q, scales) of a weight (N, K): q takes every value, scales span four octaves, and products with elements
    of size 1 are of about size 1.

    Small weights are drawn on the CPU, large ones on their device, as in `rows.random_tensor`.
    """
    if bits not in packing.INVERSE:
        raise InputError(f"weights have 8 or 4 bits; got {bits}.")
    width = k if bits == 8 else k // 2
    if n * k > 1 << 22 and device.type == "cuda":
        seed = int(torch.randint(2**31, (), generator=generator))
        generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(0, 256, (n, width), dtype=torch.uint8, generator=generator, device=generator.device)
    octaves = torch.rand((n, packing.groups(k)), generator=generator, device=generator.device)
    # A uniform integer of b bits has the deviation 2^b / sqrt(12)
    size = 12**0.5 / 2**bits * max(k, 1) ** -0.5
    scales = packing.layout(scale_dtype).empty(n, k, device)
    scales.copy_(size * torch.exp2(4 * octaves - 2))
    q = drawn.to(device)
    return (q.view(torch.int8) if bits == 8 else q), scales
