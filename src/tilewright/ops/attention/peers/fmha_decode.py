"""Other attentions over a KV cache: torch's scaled_dot_product_attention over contiguous keys, and FlashInfer's.

Keys of pages are gathered, and those of e4m3 dequantised to the queries' dtype, before anything is timed for torch:
the easier problem.  FlashInfer plans on the host before anything is timed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.dispatch import Sample
from tilewright.ops.attention.paged.args import PagedArgs, problem_of
from tilewright.ops.attention.paged.reference import gathered
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""The reference gathers the keys of every token, in float32."""


@dataclass(frozen=True)
class Contiguous:
    """One backend of torch, for one token or a full mask over sequences of one length."""

    name: str
    kernel: SDPBackend
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """torch brings it; whether it takes a problem shows when it runs."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """The call, under a context manager that allows this backend alone."""
        args, shape = problem_of(sample), sample.args[0].shape
        lengths = set(args.lengths.tolist())
        tokens = shape[1] if len(shape) == 4 else 1
        if has_options(sample) or len(lengths) != 1 or (args.causal and tokens > 1):
            return None
        q = sample.args[0].view(shape[0], tokens, *shape[-2:]).transpose(1, 2)
        k, v = (t.transpose(1, 2) for t in by_sequence(args, lengths.pop()))

        def call() -> Tensor:
            with sdpa_kernel(self.kernel):
                o = F.scaled_dot_product_attention(q, k, v, scale=args.scale, enable_gqa=q.shape[1] != k.shape[1])
            return o.transpose(1, 2).reshape(*shape[:-1], v.shape[3])

        return call


def has_options(sample: Sample) -> bool:
    """Options that torch's kernels do not have."""
    names = ("window", "softcap", "sinks")
    return bool(sample.kwargs.get("return_lse")) or any(sample.kwargs.get(name) is not None for name in names)


def by_sequence(args: PagedArgs, length: int) -> Iterable[Tensor]:
    """Keys and values (B, length, H_kv, D) of all sequences, in the queries' dtype."""
    batch = args.lengths.shape[0]
    sequence = torch.arange(batch, device=args.q.device)
    visible = torch.arange(args.capacity, device=args.q.device) < args.lengths[:, None]
    for cache, scale in ((args.k_cache, args.k_scale), (args.v_cache, args.v_scale)):
        rows = [
            gathered(cache, scale, args, sequence[b : b + 1], visible[b : b + 1])[:, :length].to(args.q.dtype)
            for b in range(batch)
        ]
        yield torch.cat(rows)


class FlashInfer:
    """The wrapper of a batch for prefill over a paged cache, with tensor cores for any number of tokens."""

    name = "flashinfer"
    devices = ("cuda",)

    def available(self) -> bool:
        """Only where it is installed."""
        return find_spec("flashinfer") is not None

    def make(self, sample: Sample) -> Call | None:
        """Planned beforehand; for pages and the queries' dtype, without sinks."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        args = problem_of(sample)
        table, page_size = args.block_table, args.k_cache.shape[1]
        if table is None or args.sinks is not None or args.k_scale is not None or sample.kwargs.get("return_lse"):
            return None
        lengths, tokens = args.lengths.tolist(), args.q.shape[0]
        if min(lengths, default=0) == 0:
            return None
        counts = [-(-n // page_size) for n in lengths]
        device, batch = args.q.device, len(lengths)
        pages = torch.cat([table[b, :count] for b, count in enumerate(counts)])
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
        last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32, device=device)
        cu = args.cu_seqlens
        if cu is None:
            cu = torch.arange(0, tokens + 1, tokens // batch, dtype=torch.int32, device=device)
        if int(cu[-1]) != tokens:
            return None
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        heads, kv_heads, d, d_v = args.q.shape[1], args.k_cache.shape[2], args.q.shape[2], args.v_cache.shape[3]
        wrapper.plan(
            cu, starts, pages, last, heads, kv_heads, d, page_size, head_dim_vo=d_v, causal=args.causal,
            sm_scale=args.scale, window_left=args.left, logits_soft_cap=args.softcap or None,
            q_data_type=args.q.dtype, kv_data_type=args.k_cache.dtype,
        )  # fmt: skip
        shape = sample.args[0].shape

        def call() -> Tensor:
            o: Tensor = wrapper.run(args.q, (args.k_cache, args.v_cache))
            return o.view(*shape[:-1], d_v)

        return call


PEERS = (
    Contiguous("cudnn", SDPBackend.CUDNN_ATTENTION),
    Contiguous("flash", SDPBackend.FLASH_ATTENTION),
    FlashInfer(),
)
