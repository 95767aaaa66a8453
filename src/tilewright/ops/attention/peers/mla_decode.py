"""Other latent attentions over a cache: torch's products over contiguous keys, and FlashInfer's.

For torch, pages are gathered and packed tokens widened before anything is timed: the easier problem.  FlashInfer plans
on the host before anything is timed.
"""

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs, problem_of
from tilewright.ops.attention.mla_decode.reference import gathered, keys_of
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""The reference gathers the keys of every token, in float32."""


class Products:
    """cuBLAS: scores and results as batched products over keys of one length, a softmax between them."""

    name = "matmul"
    devices = ("cuda",)

    def available(self) -> bool:
        """torch brings it."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """For one token, or a full mask, over sequences of one length, or as many indices."""
        args, shape = problem_of(sample), sample.args[0].shape
        keys = _contiguous(args) if not _has_options(sample) else None
        if keys is None:
            return None
        q = args.q.flatten(0, 1) if args.indices is not None else args.q.flatten(1, 2)
        values, scale = keys[..., : args.d_v], args.scale

        def call() -> Tensor:
            s = torch.matmul(q, keys.transpose(1, 2))
            o = torch.matmul(torch.softmax(s.float() * scale, -1).to(q.dtype), values)
            return o.view(*shape[:-1], args.d_v)

        return call


def _has_options(sample: Sample) -> bool:
    return bool(sample.kwargs.get("return_lse")) or sample.kwargs.get("sinks") is not None


def _contiguous(args: MlaDecodeArgs) -> Tensor | None:
    """Keys (B, n, D) that all tokens of a sequence see, or of each token's indices; None where they see others."""
    batch, each = args.q.shape[:2]
    if args.indices is not None:
        if args.lengths is not None or bool((args.indices < 0).any()):
            return None
        return torch.cat([gathered(args, keys_of(args, t, t + 1)) for t in range(batch * each)])
    assert args.lengths is not None
    lengths = set(args.lengths.tolist())
    if len(lengths) != 1 or (args.causal and each > 1):
        return None
    n = lengths.pop()
    return torch.cat([gathered(args, keys_of(args, b * each, b * each + 1))[:, :n] for b in range(batch)])


class FlashInfer:
    """`BatchMLAPagedAttentionWrapper`, of the backend that it chooses for the GPU."""

    name = "flashinfer"
    devices = ("cuda",)

    def available(self) -> bool:
        """Only where it is installed."""
        return find_spec("flashinfer") is not None

    def make(self, sample: Sample) -> Call | None:
        """Planned beforehand; for pages of dense attention in the queries' dtype, of DeepSeek's widths."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        args, table = problem_of(sample), sample.kwargs.get("block_table")
        if table is None or args.lengths is None or args.is_packed or _has_options(sample):
            return None
        (batch, each, heads, d), d_v, page_size = args.q.shape, args.d_v, args.kv_cache.shape[1]
        lengths = args.lengths.tolist()
        if min(lengths, default=0) == 0 or (d, d_v) != (576, 512):
            return None
        counts, device = [-(-n // page_size) for n in lengths], args.q.device
        pages = torch.cat([table[b, :count] for b, count in enumerate(counts)])
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
        rows = torch.arange(0, batch * each + 1, each, dtype=torch.int32, device=device)
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device))
        q = args.q.reshape(batch * each, heads, d)
        parts = q[..., :d_v].contiguous(), q[..., d_v:].contiguous(), *args.kv_cache.split((d_v, d - d_v), -1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            wrapper.plan(
                qo_indptr=rows, kv_indptr=starts, kv_indices=pages, kv_len_arr=args.lengths, num_heads=heads,
                head_dim_ckv=d_v, head_dim_kpe=d - d_v, page_size=page_size, causal=args.causal, sm_scale=args.scale,
                q_data_type=q.dtype, kv_data_type=args.kv_cache.dtype,
            )  # fmt: skip
        shape = sample.args[0].shape

        def call() -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                o: Tensor = wrapper.run(q_nope=parts[0], q_pe=parts[1], ckv_cache=parts[2], kpe_cache=parts[3])
            return o.view(*shape[:-1], d_v)

        return call


PEERS = (Products(), FlashInfer())
