"""What our layers in vLLM compute, on tensors in vLLM's layouts.  No vLLM is needed here."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.kvcache.kv_append_ import kv_append_
from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.rms_norm import rms_norm
from tilewright.ops.rope.apply_rope import apply_rope


def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """rms_norm(x), or (rms_norm(x + residual), x + residual); the sum is rounded first, as by vLLM's own kernel.

    x, residual: (..., N) of one dtype.   weight: (N,) or None.   offset: 1 for Gemma.   Writes into neither.
    """
    if residual is None:
        return rms_norm(x, weight, eps=eps, offset=offset)
    return add_rms_norm(x, residual, weight, eps=eps, offset=offset)


def rotate(
    positions: Tensor, query: Tensor, key: Tensor | None, table: Tensor, head_size: int, *, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """The first R numbers of each head of query and key, rotated; new tensors of the same shapes.

    positions: T integers of any shape.   query, key: T tokens of H and H_kv heads of `head_size`, (T, H * head_size) or
    with the heads in a dimension of their own.   table: (P, R), cosines of the R / 2 pairs before their sines.
    """
    tokens = positions.numel()
    q = query.reshape(tokens, -1, head_size)
    k = q[:, :0] if key is None else key.reshape(tokens, -1, head_size)
    cos, sin = table.chunk(2, dim=-1)
    q, k = apply_rope(
        q, k, cos, sin, interleaved=interleaved, positions=positions.flatten(), rotary_dim=table.shape[-1]
    )
    return q.reshape(query.shape), None if key is None else k.reshape(key.shape)


class Step(NamedTuple):
    """Which tokens a forward pass has.  All of it on the device but for the numbers."""

    tokens: int  # rows of query, key and value that are tokens; those behind are padding
    longest: int  # new tokens of the sequence that has the most
    starts: Tensor  # (B + 1,) int32, where the new tokens of each sequence begin
    lengths: Tensor  # (B,) int32, new tokens included
    block_table: Tensor  # (B, max_pages) int32

    @property
    def decodes(self) -> bool:
        """Has every sequence exactly one new token?"""
        return self.longest == 1 and self.tokens == self.lengths.shape[0]


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    step: Step,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store key and value in their pages, attend over the pages, and write out[:step.tokens].

    query, out: (>= tokens, H, D).   key, value: (>= tokens, H_kv, D), or None where the cache has them already.
    kv_cache: (pages, H_kv, page_size, 2 D), keys before values, in any order of memory but for the last dimension;
    query's dtype, or e4m3 with kv_scales: one float32 for keys and one for values, value = scale * stored.
    window: keys that a query sees, its own included.   sinks: (H,).
    """
    k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    starts = None if step.decodes else step.starts
    k_scale, v_scale = (
        (None, None) if kv_scales is None else (_of_heads(scale, k_cache.shape[2]) for scale in kv_scales)
    )
    if key is not None and value is not None:
        kv_append_(
            k_cache, v_cache, key[: step.tokens], value[: step.tokens], step.lengths,
            block_table=step.block_table, cu_seqlens=starts, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    q, o = query[: step.tokens], out[: step.tokens]
    left = None if window is None else (window - 1, 0)
    if starts is None:
        fmha_decode(
            q, k_cache, v_cache, step.lengths, block_table=step.block_table,
            window=left, scale=scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=o,
        )  # fmt: skip
    else:
        fmha_paged(
            q, k_cache, v_cache, starts, step.lengths, block_table=step.block_table,
            window=left, scale=scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=o,
        )  # fmt: skip


def _of_heads(scale: Tensor, heads: int) -> Tensor:
    """One scale as (H_kv,) float32; scales of heads as they are."""
    return scale.to(torch.float32).reshape(-1).expand(heads).contiguous()
