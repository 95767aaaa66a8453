"""Other attentions over joined tensors: cuDNN and FLASH by scaled_dot_product_attention, and FlexAttention.

Each is timed with the concatenation of q and q_pe and of k and the repeated k_pe, which a model without this op does
in every call, and ("..._joined", forward only) on tensors joined beforehand, which no model has for nothing.  FLASH
needs values as wide as keys, so they are padded with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.dispatch import Sample
from tilewright.ops.attention.arguments import merged
from tilewright.ops.attention.mla.args import joined
from tilewright.ops.attention.mla.workloads import COMPILED
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""The reference is cuDNN over joined tensors where it is not products with all scores in memory."""


def _options(sample: Sample) -> tuple[Any, float | None] | None:
    """(mask, scale) of a sample; None for results or layouts that peers do not have."""
    if sample.kwargs.get("return_lse") or sample.kwargs.get("layout") == "BSHD":
        return None
    mask = merged("mla", sample.kwargs.get("mask"), bool(sample.kwargs.get("causal", True)))
    return mask, sample.kwargs.get("scale")


@dataclass(frozen=True)
class Fused:
    """scaled_dot_product_attention with one backend: causal over as many keys as queries, or full.

    beforehand: join the tensors once, outside of what is timed; gradients of the five would bring it back.
    padded: values as wide as keys.
    """

    name: str
    kernel: SDPBackend
    padded: bool = False
    beforehand: bool = False
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """torch brings it; whether it takes a problem shows when it runs."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """The call, under a context manager that allows this backend alone."""
        options = _options(sample)
        if options is None:
            return None
        mask, scale = options
        q, q_pe, k, k_pe, v = sample.args
        band = (-1, -1) if mask is None else mask.band()
        causal = band == (-1, 0)
        if band not in ((-1, -1), (-1, 0)) or (causal and q.shape[2] != k.shape[2]):
            return None
        if self.beforehand and any(t.requires_grad for t in sample.args):
            return None

        def operands() -> tuple[Tensor, Tensor, Tensor]:
            wide_q, wide_k = joined(q, q_pe, k, k_pe)
            return wide_q, wide_k, F.pad(v, (0, wide_k.shape[3] - v.shape[3])) if self.padded else v

        joined_operands = operands() if self.beforehand else None

        def call() -> Tensor:
            with sdpa_kernel(self.kernel):
                o = F.scaled_dot_product_attention(*(joined_operands or operands()), None, 0.0, causal, scale=scale)
            return o[..., : v.shape[3]]

        return call


class Flex:
    """FlexAttention over tensors joined in its own graph, compiled for these very sizes."""

    name = "flex"
    devices = ("cuda",)
    cases = COMPILED

    def __init__(self) -> None:
        self._signature: object = None

    def available(self) -> bool:
        """Inductor needs Triton."""
        return find_spec("triton") is not None

    def make(self, sample: Sample) -> Call | None:
        """Calls of one signature share the code."""
        from torch.nn.attention.flex_attention import flex_attention

        options = _options(sample)
        if options is None:
            return None
        mask, scale = options
        q, _, k, _, _ = sample.args
        (batch, heads, s_q, _), s_k = q.shape, k.shape[2]
        signature = [(t.shape, t.stride(), t.dtype) for t in sample.args], repr(mask)
        if signature != self._signature:
            torch.compiler.reset()  # past its recompile limit dynamo would refuse
            self._signature = signature
        block_mask = None if mask is None else mask.to_block_mask(batch, heads, s_q, s_k, q.device)

        def attend(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor) -> Tensor:
            wide_q, wide_k = joined(q, q_pe, k, k_pe)
            return flex_attention(wide_q, wide_k, v, block_mask=block_mask, scale=scale)

        compiled: Callable[..., Any] = torch.compile(attend, dynamic=False)
        return lambda: compiled(*sample.args)


PEERS = (
    Fused("cudnn", SDPBackend.CUDNN_ATTENTION),
    Fused("cudnn_joined", SDPBackend.CUDNN_ATTENTION, beforehand=True),
    Fused("flash", SDPBackend.FLASH_ATTENTION, padded=True),
    Fused("flash_joined", SDPBackend.FLASH_ATTENTION, padded=True, beforehand=True),
    Flex(),
)
