"""Masks as transformers describes them, a function of indices and a padding mask, in closed form.

transformers builds every mask from a few functions and `and_masks`, `or_masks` of them.  These functions return
closures, which are recognised by the code object that all closures of one function share; the captured values are the
parameters of the mask.  Any other function is evaluated once, at every score.

In transformers, query i has index i + q_offset and key j has index j + kv_offset; in our masks, queries stand at the
last keys.  Where the mask is causal, keys after the last query are dropped, as in a static cache that is not full;
otherwise the intervals are shifted by the difference.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import mask as masks
from tilewright.errors import InputError
from tilewright.log import log_once
from tilewright.mask import Mask
from tilewright.models import transformers_names
from tilewright.models.attention import step
from tilewright.models.attention.carrier import CarriedMask, VisibleKeys, by_keys

MaskFunction = Callable[..., Any]
"""(batch, head, query, key) -> allowed, as transformers calls it."""


class _NoClosedForm(Exception):
    """A function without a closed form here."""


class _Positions(NamedTuple):
    """Positions of queries and keys.   keys: how many count.   lag: a query's position in our masks, less its own."""

    q_length: int
    keys: int
    kv_offset: int
    lag: int


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Build the mask of layers that run "tilewright", as transformers' AttentionMaskInterface expects it.

    attention_mask: (B, S) padding, True or 1 for a token.  Returns None where `is_causal` of the layer is all of it.
    For one query of a static cache, whose position is on the device, returns lengths (`step`) where they say all, and
    else the elements, as inside torch.compile.
    Raises InputError for a padding mask of other than two dimensions.
    """
    causal_mask_function, bidirectional_mask_function = transformers_names.mask_functions()
    function: MaskFunction = causal_mask_function if mask_function is None else mask_function
    if attention_mask is not None and attention_mask.dim() != 2:
        raise InputError(f"attention: the padding mask is {tuple(attention_mask.shape)}; needs (B, S).")
    tokens = None if attention_mask is None else attention_mask.to(device, torch.bool)
    mask_args = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function, "attention_mask": tokens, "device": device, **kwargs,
    }  # fmt: skip
    plain = tokens is None and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if torch.compiler.is_compiling() or (q_length == 1 and isinstance(q_offset, Tensor)):
        if plain and allow_is_causal_skip and q_length == kv_length and function is causal_mask_function:
            return None
        if plain and allow_is_bidirectional_skip and function is bidirectional_mask_function:
            return None
        mask = None
        if function is causal_mask_function and kv_offset == 0 and not torch.compiler.is_compiling():
            assert isinstance(q_offset, Tensor)
            mask = step.step_mask(batch_size, kv_length, q_offset, tokens, torch.device(device))
        return _elements(mask_args) if mask is None else mask
    start = int(q_offset) - kv_offset  # index of the first query among the keys
    end = start + q_length
    keys = end if end >= kv_length or _within_causal(function) else kv_length
    if start < 0 or not q_length or not kv_length:
        return _elements(mask_args)
    positions = _Positions(q_length, keys, kv_offset, keys - end)
    try:
        allowed = _closed_form(function, positions)
    except _NoClosedForm as unknown:
        log_once(
            ("attention-mask", str(unknown)),
            f"attention: {unknown} has no closed form here, it is evaluated at every score of S_q x S_k",
        )
        return _elements(mask_args)
    padding = None if tokens is None else _padding(tokens, kv_length, positions)
    if padding is not None:
        allowed = allowed & padding
    elif keys > kv_length:
        allowed = allowed & masks.prefix(kv_length)
    left, right = allowed.band() or (0, -1)
    if left < 0 or left > keys:
        if right == 0 and allow_is_causal_skip and (keys == kv_length if q_length == 1 else start == 0):
            return None
        if (right < 0 or right > keys) and allow_is_bidirectional_skip and padding is None:
            return None
    return CarriedMask(VisibleKeys(allowed, keys), (batch_size, q_length, kv_length), torch.device(device))


def _elements(mask_args: dict[str, Any]) -> Tensor | None:
    elements: Tensor | None = transformers_names.sdpa_mask()(**mask_args, allow_is_causal_skip=False)
    return elements


def _padding(tokens: Tensor, kv_length: int, positions: _Positions) -> Mask | None:
    """The mask of padding; None where every key is a token.  Waits for the device, as transformers' own masks do."""
    tokens = _at_keys(tokens, min(kv_length, positions.keys), positions.kv_offset, False)
    if bool(tokens.all()):
        return None
    return by_keys(F.pad(tokens, (0, positions.keys - tokens.shape[1]))[:, None, None])


def _at_keys(values: Tensor, keys: int, kv_offset: int, padding: int) -> Tensor:
    """Cut (B, indices) to (B, keys), a column for each key; `padding` where there is no such index."""
    columns = values[:, kv_offset : kv_offset + keys]
    return F.pad(columns, (0, keys - columns.shape[1]), value=padding)


def _within_causal(function: MaskFunction) -> bool:
    """True if the mask is causal.  False when unknown."""
    kinds = _kinds()
    if function is kinds["causal"]:
        return True
    parts = _captured(function).get("mask_functions", ())
    if _is(function, "and"):
        return any(_within_causal(part) for part in parts)
    return _is(function, "or") and all(_within_causal(part) for part in parts)


def _closed_form(function: MaskFunction, positions: _Positions) -> Mask:
    if function is _kinds()["causal"]:
        return _at_least(positions.lag)
    if function is _kinds()["bidirectional"]:
        return masks.window(None, None)
    captured = _captured(function)
    if _is(function, "and") or _is(function, "or"):
        parts = [_closed_form(part, positions) for part in captured["mask_functions"]]
        result = parts[0]
        for part in parts[1:]:
            result = result & part if _is(function, "and") else result | part
        return result
    if _is(function, "window"):
        return ~_at_least(captured["sliding_window"] + positions.lag)
    if _is(function, "window_both"):
        reach = captured["sliding_window"]
        return _at_least(positions.lag - reach) & ~_at_least(positions.lag + reach + 1)
    if _is(function, "padding"):
        return by_keys(
            _at_keys(captured["padding_mask"].bool(), positions.keys, positions.kv_offset, False)[:, None, None]
        )
    if positions.lag == 0:
        return _documents(function, captured, positions)
    raise _NoClosedForm(f"{_name(function)} over a cache that is not full")


def _documents(function: MaskFunction, captured: dict[str, Any], positions: _Positions) -> Mask:
    """Masks that compare a number of the query with one of the key."""
    if _is(function, "chunks"):
        padding = captured["left_padding"]
        indices = torch.arange(positions.keys, device=padding.device) + positions.kv_offset
        return masks.document((indices - padding[:, None]) // captured["chunk_size"], contiguous=True)
    if _is(function, "packed"):
        ids = _at_keys(captured["packed_sequence_mask"], positions.keys, positions.kv_offset, -1)
        return masks.document(ids, contiguous=True)  # transformers numbers them in order
    if _is(function, "blocks"):
        ids = _at_keys(captured["block_sequence_ids"], positions.keys, positions.kv_offset, -1)
        return masks.document(ids) & by_keys((ids >= 0)[:, None, None])
    raise _NoClosedForm(_name(function))


def _at_least(distance: int) -> Mask:
    """position - key >= distance."""
    return ~masks.window(distance - 1, None) if distance > 0 else masks.window(None, -distance)


def _is(function: MaskFunction, kind: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code is getattr(_kinds()[kind], "__code__", None)


def _captured(function: MaskFunction) -> dict[str, Any]:
    """The values that a closure captured, by name."""
    cells, code = getattr(function, "__closure__", None), getattr(function, "__code__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code and cells else {}


def _name(function: MaskFunction) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


@cache
def _kinds() -> dict[str, MaskFunction | None]:
    """One example of each kind of mask function; None for what a release of transformers lacks."""
    causal, bidirectional = transformers_names.mask_functions()

    def one(maker: str, *args: Any) -> MaskFunction | None:
        function: Callable[..., MaskFunction] | None = transformers_names.mask_maker(maker)
        return None if function is None else function(*args)

    return {
        "causal": causal,
        "bidirectional": bidirectional,
        "and": one("and_masks"),
        "or": one("or_masks"),
        "window": one("sliding_window_overlay", 1),
        "window_both": one("sliding_window_bidirectional_overlay", 1),
        "chunks": one("chunked_overlay", 1, None),
        "packed": one("packed_sequence_mask_function", None),
        "padding": one("padding_mask_function", None),
        "blocks": one("blockwise_overlay", None),
    }
