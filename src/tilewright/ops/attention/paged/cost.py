"""What attention over a KV cache must compute and move: the keys that each sequence's tokens see, read once."""

import torch
from torch import Tensor

from tilewright.dispatch import Cost, Sample
from tilewright.ops import rows
from tilewright.ops.attention.paged.args import PagedArgs, problem_of
from tilewright.ops.attention.paged.reference import tokens_of


def cost(sample: Sample, direction: str) -> Cost:
    """Two products of each visible pair; reads q and the visible keys and values with their scales, writes o and lse.

    Pages that sequences share count once for each: a cache line of another sequence is another time in the L2.
    """
    args = problem_of(sample)
    q, k, v = args.q, args.k_cache, args.v_cache
    (tokens, heads, d), (kv_heads, d_v) = q.shape, v.shape[2:]
    first, end = visible(args)
    pairs = int((end - first).sum()) * heads
    read = _keys_read(args, first, end) * kv_heads * (d * k.element_size() + d_v * v.element_size())
    for scale in (args.k_scale, args.v_scale):
        if scale is not None:
            read += 4 * (kv_heads if scale.dim() == 1 else _keys_read(args, first, end) * kv_heads)
    written = tokens * heads * (d_v * q.element_size() + 4)
    indices = rows.nbytes(args.lengths, args.block_table, args.cu_seqlens)
    return Cost(2 * pairs * (d + d_v), rows.nbytes(q) + read + indices, written)


def visible(args: PagedArgs) -> tuple[Tensor, Tensor]:
    """The keys first .. end that each token sees, both (T,)."""
    _, position, length = tokens_of(args)
    end = (torch.minimum(length, position + 1) if args.causal else length).clamp_min(0)
    first = (position - args.left).clamp_min(0) if args.left >= 0 else torch.zeros_like(end)
    return torch.minimum(first, end), end


def _keys_read(args: PagedArgs, first: Tensor, end: Tensor) -> int:
    """Keys that any token of a sequence sees, over all sequences."""
    sequence, batch = tokens_of(args).sequence, args.lengths.shape[0]
    sees = end > first
    least = torch.full((batch,), 1 << 40, device=end.device).scatter_reduce(0, sequence[sees], first[sees], "amin")
    most = torch.zeros(batch, dtype=torch.int64, device=end.device).scatter_reduce(0, sequence[sees], end[sees], "amax")
    return int((most - least).clamp_min(0).sum())
