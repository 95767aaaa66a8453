"""What the raw ops of attention over a KV cache return, and how they see `out=`."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.raw import OutputSpec
from tilewright.dispatch.replay import Targets
from tilewright.dispatch.targets import several
from tilewright.ops.attention.paged.args import PagedArgs


def outputs(args: PagedArgs) -> tuple[OutputSpec, ...]:
    """o (T, H, D_v) in q's dtype and lse (T, H), both contiguous."""
    tokens, heads, _ = args.q.shape
    lse = torch.float64 if args.q.dtype == torch.float64 else torch.float32
    return ((tokens, heads, args.v_cache.shape[3]), args.q.dtype), ((tokens, heads), lse)


def targets(out: Any, return_lse: bool, lead: tuple[int, ...] | None = None) -> Targets | None:
    """`out` of a public call for the raw op; `lead`: the dimensions of q that stand for T there."""

    def flat(t: Any) -> Any:
        """Views of (T, ...) where it is that; anything else is refused with the shape that the raw op needs."""
        if lead is None or not isinstance(t, Tensor) or t.layout is not torch.strided:
            return t
        fits = tuple(t.shape[: len(lead)]) == lead and t.is_contiguous()
        return t.view(prod(lead), *t.shape[len(lead) :]) if fits else t

    return several(out, 1 + return_lse, 2, flat)
