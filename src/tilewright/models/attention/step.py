"""One new token of each sequence over transformers' static cache: attention by `fmha_decode`, which reads lengths.

Transformers keeps the length of such a cache on the device.  A mask of elements would have every key read; instead it
holds the number of keys that are visible: int32 (B, 1, 1, S_k), one number a sequence, expanded along the keys.  It is
a plain tensor, because transformers makes the masks of a step outside of the graph that it compiles.  Padding, windows
and masks of other functions stay masks of elements.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from tilewright.dispatch import implementations
from tilewright.ops.attention.fmha_decode import FORWARD, fmha_decode


def is_served(device: torch.device) -> bool:
    """Is there more than the reference, which reads every key too?"""
    return FORWARD.has_kernels(device.type)


def step_mask(batch: int, keys: int, position: Tensor, tokens: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask of tokens at `position`, a number on the device, of sequences that begin at the first key.

    tokens: (B, columns) True for a token; None where none is padding.  Looking at it waits for the device, as making
    the masks of transformers does.  None where there is padding, and while a CUDA graph is captured, which cannot wait.
    """
    if not is_served(device) or not keys:
        return None
    if tokens is not None:
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if not bool(tokens.all() & (position < tokens.shape[1])):
            return None
    lengths = (position + 1).to(device, torch.int32).reshape(1, 1, 1, 1)
    return lengths.expand(batch, 1, 1, 1).contiguous().expand(batch, 1, 1, keys)


def is_step(mask: Any) -> TypeGuard[Tensor]:
    """Is `mask` one that `step_mask` made?"""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4


def elements(mask: Tensor) -> Tensor:
    """The same mask, bool (B, 1, 1, S_k)."""
    return torch.arange(mask.shape[3], device=mask.device) < mask


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, backend: str | None) -> bool:
    """Does `fmha_decode` compute this call?"""
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    fits = query.shape[2] == 1 and key.shape[2] == mask.shape[3] and query.dtype == key.dtype == value.dtype
    named = backend is None or backend == "torch" or backend in implementations("fmha_decode", "fwd")
    return fits and named and not grad and not dropout


def attend_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, None]:
    """query: (B, H, 1, D)   key, value: (B, H_kv, S_k, D), all of the cache   -> (B, 1, H, D_v) and None."""
    o = fmha_decode(query[:, :, 0], key.transpose(1, 2), value.transpose(1, 2), mask[:, 0, 0, 0], **options)
    assert isinstance(o, Tensor)
    return o[:, None], None
