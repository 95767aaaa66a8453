"""Other attentions over a KV cache: torch's scaled_dot_product_attention over contiguous keys, and FlashInfer's.

Keys of pages are gathered, and those of e4m3 dequantised to the queries' dtype, before anything is timed for torch:
the easier problem.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.dispatch import Sample
from tilewright.ops.attention.paged.args import PagedArgs, problem_of
from tilewright.ops.attention.paged.reference import gathered
from tilewright.ops.attention.peers.flashinfer import Decode, Prefill
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


PEERS = (
    Contiguous("cudnn", SDPBackend.CUDNN_ATTENTION),
    Contiguous("flash", SDPBackend.FLASH_ATTENTION),
    Decode("flashinfer", tensor_cores=True),
    Decode("flashinfer_cuda_cores", tensor_cores=False),
    Prefill("flashinfer_prefill"),
)
