"""What the raw ops of attention over a KV cache return."""

import torch

from tilewright.dispatch.raw import OutputSpec
from tilewright.ops.attention.paged.args import PagedArgs


def outputs(args: PagedArgs) -> tuple[OutputSpec, ...]:
    """o (T, H, D_v) in q's dtype and lse (T, H), both contiguous."""
    tokens, heads, _ = args.q.shape
    lse = torch.float64 if args.q.dtype == torch.float64 else torch.float32
    return ((tokens, heads, args.v_cache.shape[3]), args.q.dtype), ((tokens, heads), lse)
