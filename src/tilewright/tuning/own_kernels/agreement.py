"""Is the result of one configuration that of another, within a tolerance?

|ours - first| <= tolerance * (|first| + rms of its row) for every element: another tile size sums in another order,
whose error is relative to the row, not to an element that happens to be near zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.validate.bits import same_bits

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""By the dtype of a result: two of its roundings for 16 bits; in float32 room for sums of thousands, not for tf32."""
_FP8 = 2.0**-2  # one step of e5m2


def difference(first: Sequence[Tensor], ours: Sequence[Tensor], tolerance: float | None) -> str | None:
    """What is wrong with `ours`, in words, or None.   tolerance: for floating dtypes; None: that of the dtype."""
    if len(first) != len(ours):
        return f"wrong: {len(ours)} results, not {len(first)}"
    for i, (expected, result) in enumerate(zip(first, ours, strict=True)):
        fault = _compare(expected, result, tolerance)
        if fault is not None:
            return f"wrong: result {i} {fault}"
    return None


def _compare(expected: Tensor, result: Tensor, tolerance: float | None) -> str | None:
    if expected.shape != result.shape or expected.dtype != result.dtype:
        is_, was = (f"{tuple(t.shape)} {t.dtype}" for t in (result, expected))
        return f"is {is_}, not {was}"
    if same_bits(expected, result):
        return None
    if not expected.is_floating_point():
        count = int((expected != result).sum())
        return f"differs in {count} of {expected.numel()} elements" if count else None
    limit = TOLERANCE.get(expected.dtype, _FP8) if tolerance is None else tolerance
    a, b = (t.to(torch.float64 if t.dtype == torch.float64 else torch.float32) for t in (expected, result))
    special = ~a.isfinite() | ~b.isfinite()
    if bool((special & (a != b) & ~(a.isnan() & b.isnan())).any()):
        return "is NaN or infinite elsewhere"
    a, b = a.masked_fill(special, 0.0), b.masked_fill(special, 0.0)
    rows = a.square().mean() if a.dim() == 0 or a.shape[-1] == 1 else a.square().mean(-1, keepdim=True)
    excess = ((a - b).abs() / (a.abs() + rows.sqrt()).clamp_min(torch.finfo(a.dtype).tiny)).max()
    if float(excess) <= limit:
        return None
    return f"is off by {float(excess):.2g} of its row, {limit:.2g} is allowed"
