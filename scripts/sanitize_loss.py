"""Losses' cases of `sanitize_cases.py`: rows among numbers that a sum would show, in one block and in clusters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sanitize_values import DEVICE

from tilewright.ops.loss.in_place import IN_PLACE, InPlaceArgs
from tilewright.ops.loss.kernels.sm90 import cross_entropy_in_place as kernel
from tilewright.ops.loss.kernels.sm90.cross_entropy_in_place import Config

# classes, dtype, reduction, label smoothing, config
IN_PLACE_CASES = (
    (4000, torch.bfloat16, "mean", 0.0, Config(128, 2, 1)),
    (1016, torch.float32, "none", 0.1, Config(256, 4, 2)),
    (24008, torch.float16, "sum", 0.1, Config(512, 8, 2)),
)


def gradient_over_logits(n: int, dtype: torch.dtype, reduction: str, smoothing: float, config: Config) -> bool:
    """Loss, logsumexp and gradient; what lies between the rows stays."""
    memory = torch.full((7, n + 16), torch.nan, dtype=dtype, device=DEVICE)
    x = memory[:, :n].copy_(3 * torch.randn(7, n, device=DEVICE))
    target = torch.randint(0, n, (7,), device=DEVICE)
    target[2] = -100
    args = InPlaceArgs(x, target, None, None, None, -100, smoothing, 1e-3, 0.0, reduction)
    wanted = args._replace(logits=x.double())
    loss, lse = IN_PLACE.plain(*wanted)
    outs = IN_PLACE.allocate(args, DEVICE)
    kernel.launch(outs, args, config)
    close = torch.allclose(x.double(), wanted.logits, rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-5)
    same = all(torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5) for a, b in zip(outs, (loss, lse), strict=True))
    return close and same and bool(memory[:, n:].isnan().all())


LOSS_RUNS: tuple[tuple[str, Callable[..., bool], Sequence[tuple[Any, ...]]], ...] = (
    ("cross entropy in place", gradient_over_logits, IN_PLACE_CASES),
)
"""Name, function and arguments of each case."""
