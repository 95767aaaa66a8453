"""What latent attention over a KV cache must compute and move: the tokens that some query sees, read once."""

import torch

from tilewright.dispatch import Cost, Sample
from tilewright.ops import rows
from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs, problem_of


def cost(sample: Sample, direction: str) -> Cost:
    """Two products of each visible pair; reads q and the visible tokens once for both, writes o and lse.

    Pages that sequences share count once for each: a cache line of another sequence is another time in the L2.  Slots
    that several indices name count once.
    """
    args = problem_of(sample)
    q, cache = args.q, args.kv_cache
    batch, each, heads, d = q.shape
    pairs, tokens_read = _visible(args)
    indices = rows.nbytes(args.lengths, args.block_table, args.indices)
    read = tokens_read * cache.shape[2] * cache.element_size()
    written = batch * each * heads * (args.d_v * q.element_size() + 4)
    return Cost(2 * pairs * heads * (d + args.d_v), rows.nbytes(q, args.sinks) + read + indices, written)


def _visible(args: MlaDecodeArgs) -> tuple[int, int]:
    """(pairs of a new token and a key that it sees, tokens of the cache that are read)."""
    each = args.q.shape[1]
    lengths = None if args.lengths is None else args.lengths.long()
    if args.indices is not None:
        slots = args.kv_cache.shape[0] * args.kv_cache.shape[1]
        counts = (args.indices >= 0) & (args.indices < slots)
        if lengths is not None:
            column = torch.arange(args.indices.shape[2], device=args.indices.device)
            counts = counts & (column < lengths[:, None, None])
        return int(counts.sum()), int(torch.unique(args.indices[counts]).numel())
    assert lengths is not None
    lengths = lengths.clamp(0, args.capacity)
    if not args.causal:
        return int(lengths.sum()) * each, int(lengths.sum())
    later = torch.arange(each, device=lengths.device)
    return int((lengths[:, None] - later).clamp_min(0).sum()), int(lengths.sum())
