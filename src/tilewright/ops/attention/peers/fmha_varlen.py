"""Other attentions over packed sequences: torch's varlen_attn (FLASH), FlexAttention with a mask of documents, and
scaled_dot_product_attention sequence by sequence.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.mask import sequences
from tilewright.ops.attention.fmha_varlen.reference import by_head, spans
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile"), "cpu": ("compile",)}
"""The reference reads cu_seqlens, which no compiled graph does; on a GPU `sdpa_loop` is the same without its steps."""


@dataclass(frozen=True)
class Problem:
    """The arguments of a call that peers read, lengths in host memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    causal: bool
    window: tuple[int | None, int | None]
    scale: float | None

    @classmethod
    def of(cls, sample: Sample) -> "Problem | None":
        """The problem of a sample; None for options that peers do not have."""
        options = sample.kwargs
        if options.get("return_lse") or any(name in options for name in ("score_mod", "sinks", "softcap")):
            return None
        q, k, v = sample.args
        cu_q = options["cu_seqlens_q"]
        cu_k, window = options.get("cu_seqlens_k", cu_q), options.get("window") or (None, None)
        return cls(q, k, v, cu_q, cu_k, bool(options.get("causal")), window, options.get("scale"))


class VarlenAttention:
    """`torch.nn.attention.varlen`: FLASH with cu_seqlens; the longest lengths are read beforehand."""

    name = "varlen_attn"
    devices = ("cuda",)

    def available(self) -> bool:
        """Since torch 2.10."""
        return find_spec("torch.nn.attention.varlen") is not None

    def make(self, sample: Sample) -> Call | None:
        """Its names of a window differ from version to version, and heads that share keys may need a flag."""
        from torch.nn.attention.varlen import varlen_attn

        p = Problem.of(sample)
        if p is None:
            return None
        parameters = inspect.signature(varlen_attn).parameters
        left, right = (-1 if side is None else side for side in p.window)
        if p.causal:
            right = 0
        options: dict[str, Any] = {}
        if "window_size" in parameters:
            options["window_size"] = (left, right)
        elif left >= 0 or right > 0:
            return None
        else:
            options["is_causal"] = right == 0
        if p.scale is not None:
            if "scale" not in parameters:
                return None
            options["scale"] = p.scale
        if "enable_gqa" in parameters:
            options["enable_gqa"] = p.q.shape[1] != p.k.shape[1]
        most_q, most_k = (int(cu.diff().max()) for cu in (p.cu_q, p.cu_k))
        return lambda: varlen_attn(p.q, p.k, p.v, p.cu_q, p.cu_k, most_q, most_k, **options)


class Flex:
    """FlexAttention, compiled for these very sizes, with its BlockMask made beforehand."""

    name = "flex"
    devices = ("cuda",)

    def __init__(self) -> None:
        self._signature: object = None

    def available(self) -> bool:
        """Inductor needs Triton."""
        return find_spec("triton") is not None

    def make(self, sample: Sample) -> Call | None:
        """The mask of documents that its users write, its blocks from our closed forms."""
        from torch.nn.attention.flex_attention import flex_attention

        p = Problem.of(sample)
        if p is None:
            return None
        signature = [(t.shape, t.stride(), t.dtype) for t in (p.q, p.k, p.v)], p.causal, p.window
        if signature != self._signature:
            torch.compiler.reset()  # past its recompile limit dynamo would refuse
            self._signature = signature
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
        s_q, s_k = p.q.shape[0], p.k.shape[0]
        mask = sequences(p.cu_q, p.cu_k, length_q=s_q, length_k=s_k, causal=p.causal, window=p.window)
        blocks = mask.to_block_mask(1, p.q.shape[1], s_q, s_k, p.q.device)
        q, k, v = by_head(p.q, p.k, p.v)
        grouped = p.q.shape[1] != p.k.shape[1]

        def call() -> Tensor:
            o: Tensor = compiled(q, k, v, block_mask=blocks, scale=p.scale, enable_gqa=grouped)
            return o[0].transpose(0, 1)

        return call


class Loop:
    """scaled_dot_product_attention of one sequence after another, cuDNN or FLASH; lengths are read beforehand."""

    name = "sdpa_loop"
    devices = ("cuda",)

    def available(self) -> bool:
        """torch brings it."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """Its causal mask begins at the first key, and it has no window."""
        p = Problem.of(sample)
        if p is None or p.window != (None, None):
            return None
        cut = list(spans(p.cu_q, p.cu_k))
        if p.causal and any(i.stop - i.start != j.stop - j.start for i, j in cut):
            return None
        if not cut or cut[-1][0].stop != p.q.shape[0]:
            return None
        grouped = p.q.shape[1] != p.k.shape[1]

        def call() -> Tensor:
            outs = []
            for queries, keys in cut:
                operands = by_head(p.q[queries], p.k[keys], p.v[keys])
                o = F.scaled_dot_product_attention(*operands, is_causal=p.causal, scale=p.scale, enable_gqa=grouped)
                outs.append(o[0].transpose(0, 1))
            return torch.cat(outs)

        return call


PEERS = (VarlenAttention(), Flex(), Loop())
