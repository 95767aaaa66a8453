"""Other attentions: torch's scaled_dot_product_attention takes no float8, so its kernels get the operands in bf16.

They are dequantised before anything is timed, which is the easier and more exact problem: twice the bytes, and
probabilities of 8 bits instead of 4.  The reference holds every score in memory and is not a peer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.dispatch import Sample
from tilewright.ops.attention.fmha_fp8.reference import of_tokens
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}

_TAKES = ("causal", "scale")


@dataclass(frozen=True)
class Half:
    """One backend on bf16: causal over as many keys as queries, or full."""

    name: str
    kernel: SDPBackend
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """torch brings it; whether it takes a problem shows when it runs."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """The call, under a context manager that allows this backend alone."""
        options: dict[str, Any] = dict(sample.kwargs)
        if any(name not in _TAKES for name in options):
            return None
        causal = bool(options.get("causal"))
        q, k, v = (_dequantised(*pair) for pair in zip(sample.args[:3], sample.args[3:], strict=True))
        if causal and q.shape[2] != k.shape[2]:
            return None

        def call() -> Tensor:
            with sdpa_kernel(self.kernel):
                return F.scaled_dot_product_attention(
                    q, k, v, None, 0.0, causal, scale=options.get("scale"), enable_gqa=q.shape[1] != k.shape[1]
                )

        return call


def _dequantised(q: Tensor, scales: Tensor) -> Tensor:
    """q (B, H, S, D) times its scales, rounded to bf16."""
    of_blocks = scales if scales.dim() == 3 else scales[..., None]
    return (q.float() * of_tokens(of_blocks, q.shape[2])).to(torch.bfloat16)


PEERS = (Half("cudnn_bf16", SDPBackend.CUDNN_ATTENTION), Half("flash_bf16", SDPBackend.FLASH_ATTENTION))
