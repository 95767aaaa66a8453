"""Attention that only torch computes: arbitrary score modifiers, masks of a foreign BlockMask, dropout.

On a GPU torch's FlexAttention computes the first two; elsewhere, and for the reference, plain torch with all scores in
memory.  Dropout is torch's scaled_dot_product_attention.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.dispatch.preference import current_numerics
from tilewright.errors import InputError, RefusedError
from tilewright.log import log_once
from tilewright.mask import Mask
from tilewright.ops.attention.layout import loadable
from tilewright.ops.attention.score import Alibi, RelativeBias, Scores, Softcap, combined
from tilewright.ops.rows import accumulate_dtype

_VERSIONS = 1024


def check_backend(op: str, backend: str | None, what: str) -> None:
    """Refuse every backend but torch for `what`; log once that torch computes it."""
    if backend not in (None, "auto", "torch"):
        raise RefusedError(f'{op}[{backend}] has no {what}. Supported here: torch. Try backend="torch".')
    log_once((op, "torch_only", what), f"{op}: {what} is torch's, no kernel of tilewright has it")


def check_dropped(op: str, scores: Scores, return_lse: bool) -> None:
    """Refuse dropout with anything but a mask."""
    if return_lse or scores.sinks is not None or steps_of(scores):
        raise InputError(f"{op}: dropout goes with masks alone, not with score modifiers, sinks or return_lse.")


def modified(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """(o, lse) with every step of `scores`, by FlexAttention on a GPU; which takes no empty tensors."""
    if q.device.type != "cuda" or not (q.numel() and k.numel()):
        return plain(q, k, v, mask, scale, scores)
    if not torch.compiler.is_compiling():  # Inductor knows the layout of its inputs
        q, k, v = map(loadable, (q, k, v))
    from torch.nn.attention.flex_attention import AuxRequest

    (batch, heads, s_q, _), s_k = q.shape, k.shape[2]
    steps = steps_of(scores)
    attend = _uncompiled() if torch.compiler.is_compiling() else _compiled()
    o, aux = attend(
        q, k, v,
        score_mod=combined(steps, s_k - s_q) if steps else None,
        block_mask=None if mask is None else mask.to_block_mask(batch, heads, s_q, s_k, q.device),
        scale=scale,
        enable_gqa=heads != k.shape[1],
        # torch 2.11's tiles of three stages hold the table's values too, which is more than an H200's shared memory
        kernel_options={"num_stages": 2} if any(isinstance(step, RelativeBias) for step in steps) else None,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return joined(o, aux.lse, scores.sinks)


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, all scores in memory; differentiable in everything, float64 an oracle."""
    (batch, heads, s_q, d), s_k = q.shape, k.shape[2]
    acc_dtype, group = accumulate_dtype(q.dtype), heads // k.shape[1]
    keys, values = (t.to(acc_dtype).repeat_interleave(group, 1) for t in (k, v))
    s = (d**-0.5 if scale is None else scale) * (q.to(acc_dtype) @ keys.mT)
    steps = steps_of(scores)
    if steps and s.numel():
        s = _each(combined(steps, s_k - s_q))(s, *(torch.arange(n, device=q.device) for n in s.shape))
    if mask is not None:
        s = s.masked_fill(~mask.dense(batch, heads, s_q, s_k, q.device), -math.inf)
    row_max = s.detach().amax(-1, keepdim=True) if s_k else s.new_full((*s.shape[:3], 1), -math.inf)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    p = torch.exp(s - row_max)
    l_i = p.sum(-1, keepdim=True)
    any_visible = l_i != 0
    o = (p.to(v.dtype).to(acc_dtype) @ values) / torch.where(any_visible, l_i, 1.0)
    lse = torch.where(any_visible, row_max + torch.log(torch.where(any_visible, l_i, 1.0)), -math.inf)
    return joined(o.to(q.dtype), lse.squeeze(-1), scores.sinks)


def joined(o: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, lse) of a softmax after the sinks join its denominator."""
    if sinks is None:
        return o, lse
    wider = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (o * torch.exp(lse - wider)[..., None]).to(o.dtype), wider


def dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """o with each probability set to 0 with probability `dropout`, the others scaled up.

    A mask that is not causal over as many keys as queries is (B|1, H|1, S_q, S_k) booleans here.
    """
    s_q, s_k = q.shape[2], k.shape[2]
    is_causal = mask is not None and mask.band() == (-1, 0) and s_q == s_k
    allowed = None
    if mask is not None and not is_causal:
        allowed = mask.dense(q.shape[0], q.shape[1], s_q, s_k, q.device)
    eager_gpu = q.device.type == "cuda" and not torch.compiler.is_compiling()
    if eager_gpu:
        q, k, v = map(loadable, (q, k, v))
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    repeatable = wants_grad and current_numerics() == "deterministic"  # other kernels add to dq in varying order
    empty = not q.numel()  # of which torch 2.11 returns None
    with sdpa_kernel([SDPBackend.MATH]) if repeatable or empty else nullcontext():
        o = F.scaled_dot_product_attention(
            q, k, v, allowed, dropout, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if eager_gpu and o.requires_grad:
        o.register_hook(loadable)  # torch's backward does not check the address of the gradient
    return o


def steps_of(scores: Scores) -> tuple[Any, ...]:
    """Every modifier but the sinks, native ones too, as steps."""
    native: list[Any] = [Softcap(scores.softcap)] if scores.softcap else []
    if scores.slopes is not None:
        native.append(Alibi(scores.slopes))
    return (*native, *scores.rest)


def _each(mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`mod` of scalars for all of (B, H, S_q, S_k), as FlexAttention defines it."""
    mapped: Callable[..., Tensor] = mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        mapped = vmap(mapped, in_dims=dims)
    return mapped


def _uncompiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled FlexAttention; uncompiled it holds all scores in memory.

    Dynamo counts the versions of one function, eight unless told otherwise; every modifier, mask and size is one here.
    """
    import torch._dynamo.config as dynamo

    compiled: Callable[..., Any] = torch.compile(_uncompiled(), dynamic=False)

    def attend(*args: Any, **kwargs: Any) -> Any:
        with dynamo.patch(recompile_limit=_VERSIONS, accumulated_recompile_limit=_VERSIONS):
            return compiled(*args, **kwargs)

    return attend
