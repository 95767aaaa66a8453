"""`ops.fmha` under the names by which transformers looks attention up.

    tilewright             ops.fmha; the dispatcher chooses
    tilewright_<backend>   ops.fmha on exactly this backend
    tilewright_measured    ops.fmha where the tables have a faster kernel of ours, else what the model ran before

Each name also makes masks (`masks`).  With "paged|" before it, it is what continuous batching calls (`paged`), which
makes none.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.dispatch.backends import BACKENDS
from tilewright.errors import InputError
from tilewright.mask import Mask, causal, prefix, window
from tilewright.models import transformers_names
from tilewright.models.attention import masks, measured, step
from tilewright.models.attention.carrier import CarriedMask, VisibleKeys, visible_keys
from tilewright.models.attention.paged import PREFIX, attend_paged
from tilewright.models.attention.refused import refuse
from tilewright.ops.attention.fmha import fmha

NAME = "tilewright"
MEASURED = f"{NAME}_measured"


def register_attention() -> str:
    """Register `ops.fmha` with transformers: `model.set_attn_implementation("tilewright")`.  Returns that name.

    Adds this name, and those that `patch` uses, to AttentionInterface and AttentionMaskInterface and changes no entry
    of theirs; a second call changes nothing.  `patch` calls it; a process that unpickles a patched model has to.
    Up to transformers 5.18 also "paged|tilewright", for continuous batching; later releases take no names but theirs.
    GQA, `scaling`, `sliding_window`, `softcap`, sinks (`s_aux`), `dropout` and all masks of transformers are honoured.
    A position bias, masks of heads, weights (`output_attentions`) and masks of other numbers than 0 and -inf are
    InputErrors of the call.
    """
    for backend in BACKENDS:
        register_backend(backend)
    _register(MEASURED, attend_measured)
    return _register(NAME, attend)


def register_backend(backend: str) -> str:
    """Register `ops.fmha` on exactly `backend`, if that is new; returns the name."""
    return _register(f"{NAME}_{backend}", partial(attend, backend=backend), partial(attend_paged, backend=backend))


def _register(name: str, function: Callable[..., Any], paged: Callable[..., Any] = attend_paged) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    if name not in AttentionInterface():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, masks.attention_mask)
        if transformers_names.takes_paged_names():
            AttentionInterface.register(f"{PREFIX}{name}", paged)
    return name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' AttentionInterface expects it.

    query: (B, H, S_q, D)   key: (B, H_kv, S_k, D)   value: (B, H_kv, S_k, D_v); bf16|fp16|fp32
    attention_mask: a CarriedMask, or (B, 1, S_q, S_k) bool, or 0 and -inf.  None: causal from the first key on
    if `is_causal`, or by default the module's attribute of that name, is True, as in transformers' "sdpa".
    s_aux: (H,) sinks.   Returns (B, S_q, H, D_v) and None.
    Raises InputError for what `register_attention` lists, BackendError where `backend` cannot run the call.
    """
    _refuse(kwargs, attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    query, key, value = _cast(query, key, value)
    if step.is_step(attention_mask) and step.takes(query, key, value, attention_mask, dropout, backend):
        return step.attend_step(
            query, key, value, attention_mask, scale=scaling, softcap=softcap or None, sinks=s_aux, backend=backend
        )
    visible = _visible_keys(query, key, attention_mask, is_causal, sliding_window)
    o = fmha(
        query,
        _fitted(key, visible.keys),
        _fitted(value, visible.keys),
        mask=visible.mask,
        scale=scaling,
        softcap=softcap or None,
        sinks=s_aux,
        dropout=dropout,
        backend=backend,
    )
    assert isinstance(o, Tensor)
    return o.transpose(1, 2).contiguous(), None


def attend_measured(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `attend` where a kernel of ours won in the tables, else transformers' SDPA, or eager attention for extras.

    transformers also keeps calls with dropout, and those under torch.compile, whose sizes may be symbolic.  Steps over
    its static cache are `fmha_decode`'s: SDPA would read all of the cache.
    """
    _refuse(kwargs, attention_mask)
    query, key, value = _cast(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    softcap, s_aux = kwargs.get("softcap"), kwargs.get("s_aux")
    if step.is_step(attention_mask):
        if step.takes(query, key, value, attention_mask, kwargs.get("dropout", 0.0), None):
            return attend(module, query, key, value, attention_mask, is_causal=is_causal, **kwargs)
        attention_mask = step.elements(attention_mask)
    if not kwargs.get("dropout") and not torch.compiler.is_compiling():
        visible = _visible_keys(query, key, attention_mask, is_causal, kwargs.get("sliding_window"))
        fitted = _fitted(key, visible.keys), _fitted(value, visible.keys)
        if measured.prefers_ours(query, *fitted, visible.mask, softcap or None, s_aux):
            return attend(module, query, key, value, attention_mask, is_causal=is_causal, **kwargs)
    if isinstance(attention_mask, CarriedMask):
        attention_mask = attention_mask.elements
    theirs: Callable[..., Any] | None = None
    if softcap or s_aux is not None:
        theirs, attention_mask = eager_of(module), _added(attention_mask, query, key, is_causal)
    if theirs is None:
        theirs = transformers_names.sdpa_attention_forward()
    result: tuple[Tensor, Tensor | None] = theirs(
        module, query, key, value, attention_mask, is_causal=is_causal, **kwargs
    )
    return result


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """`eager_attention_forward` of the file that defines the module's class; None where there is none."""
    for cls in type(module).__mro__:
        forward = vars(cls).get("forward")
        eager = getattr(forward, "__globals__", {}).get("eager_attention_forward")
        if callable(eager):
            return eager
    return None


def _refuse(kwargs: dict[str, Any], attention_mask: Tensor | None) -> None:
    refuse(kwargs)
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        raise InputError(
            "attention: cu_seq_lens_q without a mask. Pass position_ids that begin again with every sequence: the "
            "model's mask then holds them apart."
        )


def _visible_keys(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool, sliding: int | None
) -> VisibleKeys:
    """Mask and number of keys of a call."""
    s_q, s_k = query.shape[2], key.shape[2]
    if attention_mask is not None:
        return visible_keys(attention_mask, s_q, s_k)
    if sliding is not None and sliding >= s_k:
        sliding = None  # the window holds all keys
    if not is_causal:
        if sliding is not None:
            raise InputError(
                f"attention: a window of {sliding} over {s_k} keys without a mask, for a layer that is not causal."
            )
        return VisibleKeys(None, s_k)
    if s_q == 1:
        return VisibleKeys(None if sliding is None else window(sliding - 1), s_k)
    # Queries begin at the first key, and keys after the last query are masked: a static cache that is not full
    mask: Mask = causal() if sliding is None else window(sliding - 1)
    return VisibleKeys(mask if s_q <= s_k else mask & prefix(s_k), s_q)


def _cast(*tensors: Tensor) -> Iterator[Tensor]:
    """Cast as autocast does for SDPA: rotary embeddings leave queries and keys in float32."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (t if dtype is None else t.to(dtype) for t in tensors)


def _fitted(x: Tensor, keys: int) -> Tensor:
    """The first `keys` rows of (B, H, S_k, D), padded with rows of zeros where there are fewer."""
    return x[:, :, :keys] if keys <= x.shape[2] else F.pad(x, (0, 0, 0, keys - x.shape[2]))


def _added(attention_mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    """The mask in the form that eager attention adds to the scores."""
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril()[None, None]
    if attention_mask is None or attention_mask.is_floating_point():
        return attention_mask
    zeros = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
