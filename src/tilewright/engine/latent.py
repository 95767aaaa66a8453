"""Latent attention (DeepSeek V2 and V3): a cache of latents, and queries that are absorbed to meet them.

A token has a latent c, from which one projection makes keys and values of every head, and a rotated key k_pe of all
heads: k = [W_UK c, k_pe], v = W_UV c.  As q W_UK c = (W_UK^T q) c, a query times W_UK^T attends over [c, k_pe] itself,
and W_UV is applied to what it finds.  So a token takes 576 numbers in a layer of DeepSeek V3, where keys and values of
its 128 heads take 40960, and no key is ever expanded.  Every token of a step, a prompt's too, is a sequence of its own
in `ops.mla_decode`, of the length up to itself: 3.4 times the operations of expanded keys at 128 + 64 numbers a head.
Source: DeepSeek-AI, "DeepSeek-V2", 2024.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.log import logger
from tilewright.models.transformers_names import EXPAND_LATENTS
from tilewright.ops.attention.mla_decode import mla_decode
from tilewright.ops.gemm.bmm import bmm
from tilewright.ops.kvcache.mla_kv_append_ import mla_kv_append_
from tilewright.ops.kvcache.mla_layout import LATENT, ROPE, TOKEN_BYTES

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NEAR = 0.1  # of two norms; a projection that is patched to float8 is off by 0.04


class LatentLayer(NamedTuple):
    """cache: (pages, page_size, D_c + D_r), or uint8 (pages, page_size, 656)."""

    cache: Tensor


class LatentShape(NamedTuple):
    """D_c and D_r of a layer, and the dtype of both."""

    latent: int
    rope: int
    dtype: torch.dtype

    def bytes_per_token(self, kv_dtype: torch.dtype | None) -> int:
        return (self.latent + self.rope) * self.dtype.itemsize if kv_dtype is None else TOKEN_BYTES

    def allocate(self, pages: int, page_size: int, kv_dtype: torch.dtype | None, device: torch.device) -> LatentLayer:
        """Raise InputError where e4m3 is asked for other sizes than those of its form."""
        if kv_dtype is not None and (self.latent, self.rope) != (LATENT, ROPE):
            raise InputError(
                f"Engine: kv_dtype is {kv_dtype}; latents of {self.latent} + {self.rope} numbers have no such form, "
                f"those of {LATENT} + {ROPE} do. Leave kv_dtype at None."
            )
        width, dtype = (self.latent + self.rope, self.dtype) if kv_dtype is None else (TOKEN_BYTES, torch.uint8)
        return LatentLayer(torch.zeros(pages, page_size, width, dtype=dtype, device=device))


class EachToken(NamedTuple):
    """A step's tokens as sequences of their own.   lengths: (T,) int32   block_table: (T, max_pages) int32."""

    lengths: Tensor
    block_table: Tensor


def each_token(positions: Tensor, cu_seqlens: Tensor, block_table: Tensor) -> EachToken:
    """Lengths up to each token, itself included, and 0 for padding.   positions: (T,) int64   cu_seqlens: (B + 1,)."""
    numbers = torch.arange(positions.shape[0], dtype=cu_seqlens.dtype, device=positions.device)
    sequence = torch.searchsorted(cu_seqlens[1:], numbers, right=True)
    batch = block_table.shape[0]
    lengths = torch.where(sequence < batch, positions + 1, 0).to(torch.int32)
    return EachToken(lengths, block_table[sequence.clamp(max=batch - 1)])


def latent_layers(model: nn.Module) -> list[nn.Module]:
    """The attention layers of `model` whose latents can be cached; one log line for those where only keys can."""
    every = [module for module in model.modules() if callable(getattr(module, EXPAND_LATENTS, None))]
    layers = [module for module in every if _expands_by_weight(module)]
    if len(layers) < len(every):
        logger.info("keys and values of every head are cached: %s has no plain projection", type(every[0]).__name__)
    return layers


@contextmanager
def kept_latents(layers: Iterable[nn.Module]) -> Iterator[None]:
    """`layers` hand latents on to their attention, in place of keys and values."""
    for layer in layers:
        layer.__dict__[EXPAND_LATENTS] = _as_they_are
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__[EXPAND_LATENTS]


def keeps_latents(layer: nn.Module) -> bool:
    """Is a layer inside `kept_latents`?"""
    return layer.__dict__.get(EXPAND_LATENTS) is _as_they_are


def attend(
    layer: Any, query: Tensor, latents: Tensor, k_pe: Tensor, cache: LatentLayer, step: Any, scale: float | None
) -> Tensor:
    """Store latents and attend over them.   query: (H, T, D_nope + D_r)   latents: (T, D_c)   k_pe: (T, D_r)
    step: the `Pages`.   Returns (T, H, D_v).
    """
    mla_kv_append_(cache.cache, latents, k_pe, step.lengths, block_table=step.block_table, cu_seqlens=step.cu_seqlens)
    nope, width = layer.qk_nope_head_dim, latents.shape[1]
    weight = layer.kv_b_proj.weight.view(query.shape[0], -1, width)  # (H, D_nope + D_v, D_c)
    absorbed = bmm(query[..., :nope], weight[:, :nope])
    q = torch.cat((absorbed, query[..., nope:]), -1).transpose(0, 1)  # (T, H, D_c + D_r)
    lengths, table = (step.lengths, step.block_table) if step.each_token is None else step.each_token
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    o = mla_decode(q, cache.cache, lengths, block_table=table, d_v=width, scale=scale)
    assert isinstance(o, Tensor)
    return bmm(o.transpose(0, 1), weight[:, nope:], trans_b=True).transpose(0, 1)


def _as_they_are(latents: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    return latents, k_pe


def _expands_by_weight(layer: Any) -> bool:
    """Are its keys and values what `attend` takes them for: rows of the weight of `kv_b_proj`, then the rotated key?"""
    projection = getattr(layer, "kv_b_proj", None)
    sizes = [getattr(layer, name, None) for name in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")]
    if not isinstance(projection, nn.Linear) or projection.bias is not None or None in sizes:
        return False
    weight, (nope, d_v, rope) = projection.weight, sizes
    if weight.dtype not in _WEIGHTS or weight.shape != (projection.out_features, projection.in_features):
        return False  # quantised
    like = {"dtype": weight.dtype, "device": weight.device}
    latent, k_pe = torch.linspace(-1, 1, weight.shape[1], **like), torch.linspace(1, 2, rope, **like)
    with torch.inference_mode():
        k, v = getattr(layer, EXPAND_LATENTS)(latent.view(1, 1, 1, -1), k_pe.view(1, 1, 1, -1))
        head = (weight @ latent).view(-1, nope + d_v)
        if k.shape != (1, len(head), 1, nope + rope) or v.shape != (1, len(head), 1, d_v):
            return False
        computed = torch.cat((k[0, :, 0, :nope], v[0, :, 0]), -1)
        is_near = (computed - head).norm() <= _NEAR * head.norm()
        return bool(is_near & (k[0, :, 0, nope:] == k_pe).all())
