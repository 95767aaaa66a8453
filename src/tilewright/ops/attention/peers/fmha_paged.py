"""Other attentions of packed tokens over a KV cache: scaled_dot_product_attention sequence by sequence, over keys that
are gathered beforehand, and FlashInfer's.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tilewright.dispatch import Sample
from tilewright.ops.attention.paged.args import problem_of
from tilewright.ops.attention.peers.flashinfer import Prefill
from tilewright.ops.attention.peers.fmha_decode import by_sequence, has_options
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""The reference gathers the keys of every token, in float32."""


class Loop:
    """torch's attention of one sequence after another, cuDNN or FLASH; lengths are read beforehand."""

    name = "sdpa_loop"
    devices = ("cuda",)

    def available(self) -> bool:
        """torch brings it."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """Every sequence has as many keys as new tokens at least, and no token is left over."""
        args = problem_of(sample)
        assert args.cu_seqlens is not None
        cu, lengths = args.cu_seqlens.tolist(), args.lengths.tolist()
        spans = [slice(i, j) for i, j in pairwise(cu)]
        short = any(n < part.stop - part.start for n, part in zip(lengths, spans, strict=True))
        if has_options(sample) or short or cu[-1] != args.q.shape[0]:
            return None
        keys, values = by_sequence(args, max(lengths, default=0))
        problems = []
        for b, (part, n) in enumerate(zip(spans, lengths, strict=True)):
            count = part.stop - part.start
            if count:
                q, k, v = (t.transpose(0, 1)[None] for t in (args.q[part], keys[b, :n], values[b, :n]))
                problems.append((q, k, v, causal_lower_right(count, n) if args.causal and count > 1 else None))
        grouped = args.q.shape[1] != args.k_cache.shape[2]

        def call() -> Tensor:
            outs = []
            for q, k, v, bias in problems:
                o = F.scaled_dot_product_attention(q, k, v, bias, scale=args.scale, enable_gqa=grouped)
                outs.append(o[0].transpose(0, 1))
            return torch.cat(outs)

        return call


PEERS = (Loop(), Prefill("flashinfer"))
