"""Other attentions: cuDNN, FLASH, EFFICIENT for float32, plain torch and dense masks by scaled_dot_product_attention,
FlexAttention, FlashAttention 4.
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
from tilewright.mask.program import extent
from tilewright.ops.attention import torch_only
from tilewright.ops.attention.arguments import merged
from tilewright.ops.attention.fmha.workloads import COMPILED, DENSE, UNFUSED
from tilewright.ops.attention.score import Scores, combined, split
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""The reference is cuDNN or FLASH where it is not products with all scores in memory."""


@dataclass(frozen=True)
class Problem:
    """The arguments of a call that peers read."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    scores: Scores
    scale: float | None

    @classmethod
    def of(cls, sample: Sample) -> "Problem | None":
        """The problem of a sample; None for results or layouts that peers do not have."""
        options = sample.kwargs
        if options.get("return_lse") or options.get("layout") == "BSHD":
            return None
        q, k, v = sample.args
        mask = merged("fmha", options.get("mask"), bool(options.get("causal")))
        scores = split("fmha", options.get("score_mod"), options.get("softcap"), options.get("sinks"))
        return cls(q, k, v, mask, scores, options.get("scale"))

    @property
    def band(self) -> tuple[int, int] | None:
        """The band of the mask."""
        return (-1, -1) if self.mask is None else self.mask.band()


@dataclass(frozen=True)
class Fused:
    """scaled_dot_product_attention with one backend: causal over as many keys as queries, or full."""

    name: str
    kernel: SDPBackend
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """torch brings it; whether it takes a problem shows when it runs."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """The call, under a context manager that allows this backend alone."""
        p = Problem.of(sample)
        if (
            p is None
            or p.scores.sinks is not None
            or torch_only.steps_of(p.scores)
            or p.band not in ((-1, -1), (-1, 0))
        ):
            return None
        causal = p.band == (-1, 0)
        if causal and p.q.shape[2] != p.k.shape[2]:
            return None

        def call() -> Tensor:
            with sdpa_kernel(self.kernel):
                return F.scaled_dot_product_attention(
                    p.q, p.k, p.v, None, 0.0, causal, scale=p.scale, enable_gqa=p.q.shape[1] != p.k.shape[1]
                )

        return call


class Unfused(Fused):
    """With all scores in memory, which short sequences alone allow."""

    cases = UNFUSED


class OfFloat32(Fused):
    """Torch's only fused kernel of float32, behind cuDNN and FLASH for other dtypes.  It has no grouped heads."""

    def make(self, sample: Sample) -> Call | None:
        """The call; None for other dtypes and grouped heads."""
        q, k, _ = sample.args
        return super().make(sample) if q.dtype == torch.float32 and q.shape[1] == k.shape[1] else None


@dataclass(frozen=True)
class DenseMask:
    """scaled_dot_product_attention with the mask as a tensor, made beforehand: (1, 1, S_q, S_k) booleans, which torch
    turns into a bias of q's dtype in every call, or with alibi that bias itself, (1, H, S_q, S_k).

    repeats: the kernel has no grouped heads; key heads are repeated beforehand, at no charge.
    """

    name: str
    kernel: SDPBackend
    repeats: bool = False
    devices: tuple[str, ...] = ("cuda",)
    cases = DENSE

    def available(self) -> bool:
        """torch brings it; whether it takes a problem shows when it runs."""
        return True

    def make(self, sample: Sample) -> Call | None:
        """None for what is no sum: a soft cap, sinks, other modifiers."""
        p = Problem.of(sample)
        if p is None or p.mask is None or p.scores.sinks is not None or p.scores.softcap or p.scores.rest:
            return None
        s_q, s_k, group = p.q.shape[2], p.k.shape[2], p.q.shape[1] // p.k.shape[1]
        dense = p.mask.dense(*extent(p.mask.program("cpu")[0], *p.q.shape[:2]), s_q, s_k, p.q.device)
        if p.scores.slopes is not None:
            dense = biased(dense, p.scores.slopes, p.q.dtype)
        k, v = (t.repeat_interleave(group, 1) for t in (p.k, p.v)) if self.repeats else (p.k, p.v)

        def call() -> Tensor:
            with sdpa_kernel(self.kernel):
                return F.scaled_dot_product_attention(
                    p.q, k, v, dense, scale=p.scale, enable_gqa=p.q.shape[1] != k.shape[1]
                )

        return call


def biased(allowed: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """ALiBi as a bias, -inf where a key is masked.

    allowed: (B, H or 1, S_q, S_k) bool   slopes: (H,)   Returns (B, H, S_q, S_k) of dtype, made a head at a time.
    """
    batch, _, s_q, s_k = allowed.shape
    visible = allowed.expand(-1, len(slopes), -1, -1)
    positions = torch.arange(s_k - s_q, s_k, device=allowed.device)
    distance = (positions[:, None] - torch.arange(s_k, device=allowed.device)).abs()
    bias = torch.empty(batch, len(slopes), s_q, s_k, dtype=dtype, device=allowed.device)
    for head, slope in enumerate(slopes):
        bias[:, head] = torch.where(visible[:, head], -slope * distance, -torch.inf)
    return bias


class Flex:
    """FlexAttention, compiled for these very sizes, with its BlockMask made beforehand."""

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
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        p = Problem.of(sample)
        if p is None:
            return None
        (batch, heads, s_q, _), s_k = p.q.shape, p.k.shape[2]
        signature = [(t.shape, t.stride(), t.dtype) for t in (p.q, p.k, p.v)], repr(p.mask), p.scores.softcap
        if signature != self._signature:
            torch.compiler.reset()  # past its recompile limit dynamo would refuse
            self._signature = signature
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
        steps = torch_only.steps_of(p.scores)
        options: dict[str, Any] = {
            "score_mod": combined(steps, s_k - s_q) if steps else None,
            "block_mask": None if p.mask is None else p.mask.to_block_mask(batch, heads, s_q, s_k, p.q.device),
            "scale": p.scale,
            "enable_gqa": heads != p.k.shape[1],
        }
        if p.scores.sinks is None:
            return lambda: compiled(p.q, p.k, p.v, **options)

        def call() -> Tensor:
            o, aux = compiled(p.q, p.k, p.v, return_aux=AuxRequest(lse=True), **options)
            return torch_only.joined(o, aux.lse, p.scores.sinks)[0]

        return call


class FlashAttention4:
    """The CuTe kernels of the package flash-attn-4, where it is installed: bands, softcap."""

    name = "fa4"
    devices = ("cuda",)

    def available(self) -> bool:
        """Its module is a part of a namespace that an older package may hold."""
        return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None

    def make(self, sample: Sample) -> Call | None:
        """It takes (B, S, H, D), and counts positions from the last key as we do."""
        from flash_attn.cute import flash_attn_func

        p = Problem.of(sample)
        if p is None or p.band is None or p.scores.rest or p.scores.slopes is not None or p.scores.sinks is not None:
            return None
        left, right = p.band
        causal = (left, right) == (-1, 0)
        options: dict[str, Any] = {"softmax_scale": p.scale, "causal": causal, "softcap": p.scores.softcap}
        if not causal and (left, right) != (-1, -1):
            options["window_size"] = (None if left < 0 else left, None if right < 0 else right)
        rows = [t.transpose(1, 2) for t in (p.q, p.k, p.v)]

        def call() -> Tensor:
            result = flash_attn_func(*rows, **options)
            o: Tensor = result[0] if isinstance(result, tuple) else result
            return o.transpose(1, 2)

        return call


PEERS = (
    Fused("cudnn", SDPBackend.CUDNN_ATTENTION),
    Fused("flash", SDPBackend.FLASH_ATTENTION),
    OfFloat32("efficient", SDPBackend.EFFICIENT_ATTENTION),
    Unfused("math", SDPBackend.MATH),
    DenseMask("dense_mask_cudnn", SDPBackend.CUDNN_ATTENTION),
    DenseMask("dense_mask", SDPBackend.EFFICIENT_ATTENTION, repeats=True),
    Flex(),
    FlashAttention4(),
)
