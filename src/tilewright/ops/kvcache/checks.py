"""Checks of the arguments that all ops over a KV cache have; each names what was given and what is allowed."""

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewright.errors import InputError
from tilewright.ops.quant.numbers import E4M3
from tilewright.settings import current

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORM = "(pages, page_size, H_kv, D), or (B, capacity, H_kv, D) without a block_table"


def check_tensors(op: str, like: Tensor, **tensors: Tensor | None) -> None:
    """Each is a tensor on the device of `like`, or None."""
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.device != like.device:
            raise InputError(f"{op}: {name} is on {t.device}, the cache on {like.device}. Move them to one device.")


def check_forms(op: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Two caches of one dtype and form."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, Tensor):
            raise InputError(f"{op}: {name} is a {type(cache).__name__}; needs a torch.Tensor.")
        if cache.dim() != 4:
            raise InputError(f"{op}: {name} is {tuple(cache.shape)}; needs {_FORM}.")
        if cache.dtype not in (*DTYPES, E4M3):
            raise InputError(f"{op}: {name} is {cache.dtype}; needs bfloat16, float16, float32 or float8_e4m3fn.")
    check_tensors(op, k_cache, v_cache=v_cache)
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise InputError(
            f"{op}: k_cache is {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}; "
            "they must have one dtype, and differ in the last dimension at most."
        )


def check_caches(op: str, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Two caches of one dtype and form; with scales, of heads or of tokens, exactly if they are e4m3."""
    check_forms(op, k_cache, v_cache)
    check_tensors(op, k_cache, k_scale=k_scale, v_scale=v_scale)
    if (k_scale is None) != (v_scale is None) or (k_scale is None) != (k_cache.dtype != E4M3):
        raise InputError(
            f"{op}: the caches are {k_cache.dtype}, k_scale is {_given(k_scale)}, v_scale {_given(v_scale)}; "
            "float8_e4m3fn needs both, other dtypes neither."
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.dtype != torch.float32 or scale.shape not in _scale_shapes(k_cache)):
            heads, tokens = _scale_shapes(k_cache)
            raise InputError(
                f"{op}: {name} is {tuple(scale.shape)} {scale.dtype}; needs float32 {tuple(heads)}, a scale for each "
                f"head, or {tuple(tokens)}, one for each token and head."
            )
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        raise InputError(f"{op}: k_scale is {tuple(k_scale.shape)}, v_scale {tuple(v_scale.shape)}; needs one kind.")


def _scale_shapes(cache: Tensor) -> tuple[torch.Size, torch.Size]:
    return cache.shape[2:3], cache.shape[:3]


def _given(t: Tensor | None) -> str:
    return "None" if t is None else "given"


def check_integers(op: str, like: Tensor, **vectors: tuple[Tensor | None, tuple[int, ...] | None]) -> None:
    """Each (tensor, shape) is int32 on the device of `like`, or None; a shape of None is any vector."""
    check_tensors(op, like, **{name: t for name, (t, _) in vectors.items()})
    for name, (t, shape) in vectors.items():
        if t is None:
            continue
        wrong = t.dim() != 1 if shape is None else t.shape != shape
        if t.dtype != torch.int32 or wrong:
            needs = "a vector" if shape is None else str(shape)
            raise InputError(f"{op}: {name} is {tuple(t.shape)} {t.dtype}; needs int32, {needs}.")


def check_sequences(
    op: str, cache: Tensor, tokens: int | None, lengths: Tensor, block_table: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Metadata of B sequences fit the cache and `tokens` packed tokens; None: there are no packed tokens."""
    check_tensors(op, cache, lengths=lengths, block_table=block_table, cu_seqlens=cu_seqlens)
    if lengths is None:
        raise InputError(f"{op}: lengths is None; needs int32 (B,).")
    check_integers(op, cache, lengths=(lengths, None))
    batch = lengths.shape[0]
    if block_table is None:
        if cache.shape[0] != batch:
            raise InputError(
                f"{op}: the caches have {cache.shape[0]} pages for {batch} sequences (lengths); without a block_table "
                "each sequence has its own, (B, capacity, H_kv, D)."
            )
    elif block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise InputError(
            f"{op}: block_table is {tuple(block_table.shape)} {block_table.dtype}; needs int32 ({batch}, max_pages)."
        )
    check_integers(op, cache, cu_seqlens=(cu_seqlens, (batch + 1,)))
    if tokens is not None and cu_seqlens is None and (tokens % batch if batch else tokens):
        raise InputError(
            f"{op}: {tokens} tokens for {batch} sequences; without cu_seqlens each has equally many new ones."
        )


def check_packed(op: str, cache: Tensor, tokens: int, **tensors: Tensor) -> None:
    """Each is (T, H, D) with the T of `tokens`, of one dtype, the cache's unless that is e4m3."""
    check_tensors(op, cache, **tensors)
    allowed = DTYPES if cache.dtype == E4M3 else (cache.dtype,)
    first = next(iter(tensors.values())).dtype
    for name, x in tensors.items():
        if x.dim() != 3 or x.shape[0] != tokens:
            raise InputError(f"{op}: {name} is {tuple(x.shape)}; needs packed tokens ({tokens}, heads, D).")
        if x.dtype not in allowed or x.dtype != first:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise InputError(f"{op}: {name} is {x.dtype}, caches {cache.dtype}; needs one dtype of {names} for all.")


def check_fits(op: str, name: str, x: Tensor, cache: Tensor) -> None:
    """x (T, H, D) has the heads and the width of the cache."""
    if x.shape[1:] != cache.shape[2:]:
        raise InputError(
            f"{op}: {name} is {tuple(x.shape)}, its cache {tuple(cache.shape)}; needs (T, {cache.shape[2]}, "
            f"{cache.shape[3]})."
        )


def refuse_gradient(op: str, **tensors: Tensor | None) -> None:
    """Raise InputError where a gradient is wanted: these ops have none."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and torch.is_grad_enabled() and t.requires_grad:
            raise InputError(f"{op} has no gradient, and {name} requires one. Detach it, or use torch.no_grad().")


def may_read(t: Tensor) -> bool:
    """May a check look at the numbers in `t`?  On a CPU always; on a GPU, which it waits for, under TILEWRIGHT_CHECK=1
    and outside of captures.  Traced tensors have none.
    """
    if type(t) not in (Tensor, Parameter) or t.is_meta or torch.compiler.is_compiling():
        return False
    return t.device.type == "cpu" or (current().check and not torch.cuda.is_current_stream_capturing())


def check_numbers(
    op: str, cache: Tensor, tokens: int | None, lengths: Tensor, block_table: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Lengths, table and cu_seqlens stay inside of the cache, as far as a call would follow them.

    tokens: how many packed tokens are written or read, the last of each sequence; None: all of each sequence.
    """
    if not lengths.shape[0] or not may_read(lengths):
        return
    pages, page_size = cache.shape[:2]
    n = lengths.long().cpu()
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    if int(n.min()) < 0 or int(n.max()) > capacity:
        raise InputError(f"{op}: lengths reach from {int(n.min())} to {int(n.max())}; needs 0 to {capacity}.")
    new = _new_tokens(op, n, tokens, cu_seqlens)
    short = ((new > n) & (n > 0)).nonzero().flatten().tolist()
    if short:
        b = short[0]
        raise InputError(
            f"{op}: sequence {b} has {int(new[b])} new tokens and a length of {int(n[b])}, which includes them. "
            "A length of 0 leaves a sequence out."
        )
    if block_table is None or not capacity:
        return
    block = torch.arange(block_table.shape[1])
    used = (block * page_size < n[:, None]) & ((block + 1) * page_size > (n - new)[:, None])
    entries = block_table.cpu()[used]
    if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= pages):
        raise InputError(
            f"{op}: the pages in use reach from {int(entries.min())} to {int(entries.max())} in block_table; "
            f"needs 0 to {pages - 1}."
        )


def _new_tokens(op: str, n: Tensor, tokens: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """How many tokens of each sequence a call writes or reads."""
    if tokens is None:
        return n
    if cu_seqlens is None:
        return torch.full_like(n, tokens // n.shape[0])
    bounds = cu_seqlens.long().cpu()
    new = bounds.diff()
    if int(bounds[0]) != 0 or int(bounds[-1]) > tokens or int(new.min()) < 0:
        raise InputError(f"{op}: cu_seqlens is {bounds.tolist()[:9]}; must not fall, from 0 to at most T = {tokens}.")
    return new
