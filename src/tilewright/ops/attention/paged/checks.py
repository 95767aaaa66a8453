"""What attention over a KV cache refuses before anything is launched, in words."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention.checks import check_scale
from tilewright.ops.kvcache.checks import may_read
from tilewright.ops.quant.numbers import E4M3
from tilewright.ops.rows import FLOATS
from tilewright.settings import current

if TYPE_CHECKING:
    from tilewright.ops.attention.paged.args import Cache, PagedArgs


def check_tensors(op: str, q: Any, cache: "Cache", k_scale: Any, v_scale: Any) -> None:
    """Tensors with as many dimensions as their names say, in dtypes that kernels read."""
    for name, t, form in (
        ("q", q, "(T, H, D)"),
        ("k_cache", cache.k, "(pages, page_size, H_kv, D)"),
        ("v_cache", cache.v, "(pages, page_size, H_kv, D)"),
    ):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dim() != form.count(",") + 1:
            raise InputError(f"{op}: {name} is {tuple(t.shape)}; needs {form}.")
        if t.dtype not in FLOATS and (name == "q" or t.dtype != E4M3):
            more = "" if name == "q" else ", or float8_e4m3fn with scales"
            raise InputError(f"{op}: {name} is {t.dtype}; needs one of bfloat16, float16, float32{more}.")
    batch = cache.lengths.shape[0] if isinstance(cache.lengths, Tensor) and cache.lengths.dim() else 0
    indices = (
        ("lengths", cache.lengths, "(B,)", (batch,)),
        ("block_table", cache.block_table, f"({batch}, max_pages)", (batch, None)),
        ("cu_seqlens_q", cache.cu_seqlens, f"({batch + 1},), one more than lengths", (batch + 1,)),
    )
    for name, t, form, shape in indices:
        if t is None and name != "lengths":
            continue
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs {form} int32 on {q.device}.")
        fits = t.dim() == len(shape) and all(n in (m, None) for m, n in zip(t.shape, shape, strict=True))
        if not fits or t.dtype != torch.int32 or t.device != q.device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs {form} int32 on {q.device}."
            )
    for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
        if t is not None and not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a float32 tensor.")


def band_of(op: str, causal: Any, window: Any) -> tuple[int, bool]:
    """(left, causal) of the two options; left -1: no limit."""
    if window is None:
        return -1, bool(causal)
    if not isinstance(window, tuple) or len(window) != 2:
        raise InputError(f"{op}: window is {window!r}; needs (left, 0), the keys before a query's own position.")
    left, right = window
    if right not in (0, None) or isinstance(right, bool):
        raise InputError(f"{op}: window is {window!r}; its right side is 0, or None for no limit.")
    if left is not None and (type(left) is not int or left < 0):
        raise InputError(f"{op}: window is {window!r}; left is a number of keys from 0, or None for no limit.")
    return -1 if left is None else left, bool(causal) or right == 0


def check(op: str, args: "PagedArgs") -> None:
    """Raises InputError for raw arguments that cannot run."""
    q, k, v = args.q, args.k_cache, args.v_cache
    (tokens, heads, d), (pages, page_size, h_k, d_k), (batch,) = q.shape, k.shape, args.lengths.shape
    shapes = f"q is {tuple(q.shape)}, k_cache {tuple(k.shape)}, v_cache {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3]:
        raise InputError(f"{op}: {shapes}; the caches must agree in pages, page_size and H_kv.")
    if d != d_k or d == 0 or v.shape[3] == 0:
        raise InputError(f"{op}: {shapes}; q and k_cache must agree in D, which is at least 1, as is that of v_cache.")
    if h_k == 0 or heads % h_k:
        raise InputError(f"{op}: {shapes}; the heads of q must be a multiple of those of the caches.")
    if page_size == 0:
        raise InputError(f"{op}: {shapes}; a page holds at least one token.")
    if k.dtype != v.dtype or k.dtype not in (q.dtype, E4M3):
        raise InputError(
            f"{op}: q is {q.dtype}, k_cache {k.dtype}, v_cache {v.dtype}; caches have the dtype of q, or both are "
            "float8_e4m3fn with scales."
        )
    if args.block_table is None and pages != batch:
        raise InputError(
            f"{op}: {shapes} and lengths ({batch},); contiguous caches are (B, capacity, H_kv, D). Give a block_table "
            "for pages."
        )
    if args.cu_seqlens is None and (tokens % batch if batch else tokens):
        raise InputError(f"{op}: {shapes} and lengths ({batch},); q holds as many tokens for each sequence.")
    _check_scales(op, args)
    if any(t.device != q.device for t in (k, v)):
        raise InputError(f"{op}: q is on {q.device}, k_cache on {k.device}, v_cache on {v.device}. Move them together.")
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise InputError(f"{op}: q or a cache has another last stride than 1. Call .contiguous().")
    sinks = args.sinks
    if sinks is not None and (
        tuple(sinks.shape) != (heads,) or sinks.dtype != torch.float32 or sinks.device != q.device
    ):
        raise InputError(
            f"{op}: sinks is {tuple(sinks.shape)} {sinks.dtype} on {sinks.device}; needs ({heads},), one float32 a "
            f"head, on {q.device}."
        )
    check_scale(op, args.scale)
    if args.left < -1 or args.softcap < 0:
        raise InputError(f"{op}: left {args.left}, softcap {args.softcap} are below what they may be.")
    floating = (q, k, v, sinks, args.k_scale, args.v_scale)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floating):
        raise InputError(f"{op}: attention over a KV cache has no gradient. Use torch.no_grad(), or fmha.")
    if batch and current().check and may_read(args.lengths):
        _check_numbers(op, args)


def _check_numbers(op: str, args: "PagedArgs") -> None:
    """Lengths, cu_seqlens and the pages that some token sees lie inside of the cache and of q."""
    n = args.lengths.long().cpu()
    if int(n.min()) < 0 or int(n.max()) > args.capacity:
        raise InputError(f"{op}: lengths reach from {int(n.min())} to {int(n.max())}; needs 0 to {args.capacity}.")
    tokens = args.q.shape[0]
    if args.cu_seqlens is None:
        new = torch.full_like(n, tokens // n.shape[0])
    else:
        bounds = args.cu_seqlens.long().cpu()
        new = bounds.diff()
        if int(bounds[0]) != 0 or int(bounds[-1]) > tokens or int(new.min()) < 0:
            raise InputError(
                f"{op}: cu_seqlens_q is {bounds.tolist()[:9]}; must not fall, from 0 to at most T = {tokens}."
            )
    if args.block_table is None:
        return
    pages, page_size = args.k_cache.shape[:2]
    first = (n - new - args.left).clamp_min(0) if args.left >= 0 else torch.zeros_like(n)
    block = torch.arange(args.block_table.shape[1])
    used = (block * page_size < n[:, None]) & ((block + 1) * page_size > first[:, None]) & (new > 0)[:, None]
    entries = args.block_table.cpu()[used]
    if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= pages):
        raise InputError(
            f"{op}: the pages in use reach from {int(entries.min())} to {int(entries.max())} in block_table; "
            f"needs 0 to {pages - 1}."
        )


def _check_scales(op: str, args: "PagedArgs") -> None:
    """Float32, of heads or of tokens, with e4m3 caches and with no others."""
    k = args.k_cache
    for name, t in (("k_scale", args.k_scale), ("v_scale", args.v_scale)):
        if (t is not None) != (k.dtype == E4M3):
            state = "missing" if t is None else "given"
            raise InputError(f"{op}: {name} is {state}, and the caches are {k.dtype}; scales go with float8_e4m3fn.")
        if t is None:
            continue
        heads, tokens = (k.shape[2],), tuple(k.shape[:3])
        if tuple(t.shape) not in (heads, tokens) or t.dtype != torch.float32 or t.device != k.device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs {heads}, one float32 a head, or "
                f"{tokens}, one for each token and head, on {k.device}."
            )
