"""The same values in other memory layouts.  Gaps hold NaN, so that a kernel which reads one gives NaN."""

import torch
from torch import Tensor

GAP = 3  # elements between rows: every row starts at another alignment


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions swapped in memory; a vector gets stride 2."""
    return t.mT.contiguous().mT if t.dim() > 1 else every_second(t)


def outer_transposed(t: Tensor) -> Tensor:
    """(B, S, H, D) in memory, seen as (B, H, S, D); with fewer than four dimensions as `padded_rows`."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 3 else padded_rows(t)


def padded_rows(t: Tensor) -> Tensor:
    """Rows of a wider matrix: unit stride inside a row, a gap between rows."""
    return _inside(t, (*t.shape[:-1], t.shape[-1] + GAP))[..., : t.shape[-1]].copy_(t) if t.dim() else t


def every_second(t: Tensor) -> Tensor:
    """Stride 2 in the last dimension."""
    return _inside(t, (*t.shape, 2))[..., 0].copy_(t)


def odd_singles(t: Tensor) -> Tensor:
    """Change the strides of dimensions of one element, which address nothing, to odd ones or ones beyond 32 bits."""
    odd = (7, 1 << 33, 1)
    strides = [odd[i % 3] if n == 1 else s for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True))]
    return t.as_strided(t.shape, strides)


def misaligned(t: Tensor) -> Tensor:
    """Contiguous, starting one element after an aligned address."""
    return _inside(t, (t.numel() + 2,))[1 : t.numel() + 1].view(t.shape).copy_(t)


LAYOUTS = {
    "transposed": transposed,
    "outer_transposed": outer_transposed,
    "padded_rows": padded_rows,
    "every_second": every_second,
}


def _inside(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, torch.nan if t.is_floating_point() else 0, dtype=t.dtype, device=t.device)
