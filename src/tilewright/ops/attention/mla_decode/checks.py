"""What `mla_decode` refuses before anything is launched, in words."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention.checks import check_scale
from tilewright.ops.kvcache.checks import may_read
from tilewright.ops.kvcache.mla_layout import LATENT, ROPE, TOKEN_BYTES, is_packed
from tilewright.ops.rows import FLOATS
from tilewright.settings import current

if TYPE_CHECKING:
    from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs

MOST_TOKENS = 8
"""New tokens of a sequence."""
_CACHE = "(pages, page_size, D), (pages, page_size, 1, D), or (B, capacity, D) without a block_table"


def check_tensors(op: str, q: Any, kv_cache: Any, lengths: Any, block_table: Any, indices: Any) -> None:
    """Tensors with as many dimensions as their names say, in dtypes that kernels read."""
    for name, t in (("q", q), ("kv_cache", kv_cache)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
    if q.dim() not in (3, 4):
        raise InputError(f"{op}: q is {tuple(q.shape)}; needs (B, S_q, H, D), or (B, H, D) for one token each.")
    if q.dtype not in FLOATS:
        raise InputError(f"{op}: q is {q.dtype}; needs one of bfloat16, float16, float32.")
    if q.dim() == 4 and not 1 <= q.shape[1] <= MOST_TOKENS:
        raise InputError(f"{op}: q is {tuple(q.shape)}; S_q is 1 to {MOST_TOKENS}.")
    if kv_cache.dim() not in (3, 4) or (kv_cache.dim() == 4 and kv_cache.shape[2] != 1):
        raise InputError(f"{op}: kv_cache is {tuple(kv_cache.shape)}; needs {_CACHE}.")
    if kv_cache.dtype != q.dtype and not is_packed(kv_cache):
        raise InputError(
            f"{op}: q is {q.dtype}, kv_cache {tuple(kv_cache.shape)} {kv_cache.dtype}; the cache has the dtype of q, "
            f"or is uint8 or float8_e4m3fn with tokens of {TOKEN_BYTES} bytes."
        )
    if lengths is None and indices is None:
        raise InputError(f"{op}: lengths is None; needs ({q.shape[0]},) int32, unless there are indices.")
    if block_table is not None and indices is not None:
        raise InputError(f"{op}: indices are slots of the cache, page * page_size + offset; give no block_table.")
    batch, tokens = q.shape[0], q.shape[1] if q.dim() == 4 else 1
    numbers = (
        ("lengths", lengths, f"({batch},)", (batch,)),
        ("block_table", block_table, f"({batch}, max_pages)", (batch, None)),
        ("indices", indices, f"({batch}, {tokens}, topk)", (batch, tokens, None)),
    )
    for name, t, form, shape in numbers:
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs {form} int32 on {q.device}.")
        fits = t.dim() == len(shape) and all(n in (m, None) for m, n in zip(t.shape, shape, strict=True))
        if not fits or t.dtype != torch.int32 or t.device != q.device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs {form} int32 on {q.device}."
            )


def check(op: str, args: "MlaDecodeArgs") -> None:
    """Raises InputError for raw arguments that cannot run."""
    q, cache = args.q, args.kv_cache
    (batch, _, heads, d), (pages, page_size, width) = q.shape, cache.shape
    shapes = f"q is {tuple(q.shape)}, kv_cache {tuple(cache.shape)} {cache.dtype}"
    if args.is_packed and (d, args.d_v) != (LATENT + ROPE, LATENT):
        raise InputError(
            f"{op}: {shapes}, d_v {args.d_v}; a token of {TOKEN_BYTES} bytes has D = {LATENT + ROPE} and "
            f"d_v = {LATENT}."
        )
    if not args.is_packed and (d != width or d == 0):
        raise InputError(f"{op}: {shapes}; they must agree in D, which is at least 1.")
    if type(args.d_v) is not int or not 1 <= args.d_v <= d:
        raise InputError(f"{op}: d_v is {args.d_v!r}; needs 1 to D = {d}: values are the first columns of a token.")
    if page_size == 0:
        raise InputError(f"{op}: {shapes}; a page holds at least one token.")
    if args.block_table is None and args.indices is None and pages != batch:
        raise InputError(f"{op}: {shapes}; contiguous caches are (B, capacity, D). Give a block_table for pages.")
    if cache.device != q.device:
        raise InputError(f"{op}: q is on {q.device}, kv_cache on {cache.device}. Move them together.")
    if any(t.stride(-1) != 1 for t in (q, cache)):
        raise InputError(f"{op}: q or kv_cache has another last stride than 1. Call .contiguous().")
    sinks = args.sinks
    if sinks is not None and (
        tuple(sinks.shape) != (heads,) or sinks.dtype not in (torch.float32, torch.float64) or sinks.device != q.device
    ):
        raise InputError(
            f"{op}: sinks is {tuple(sinks.shape)} {sinks.dtype} on {sinks.device}; needs ({heads},), one float32 a "
            f"head, on {q.device}."
        )
    check_scale(op, args.scale)
    floating = (q, cache, sinks)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floating):
        raise InputError(f"{op}: attention over a KV cache has no gradient. Use torch.no_grad(), or mla.")
    if batch and current().check and may_read(q):
        _check_numbers(op, args)


def _check_numbers(op: str, args: "MlaDecodeArgs") -> None:
    """Lengths are none below 0, and they, the pages in use and the indices that count lie inside of the cache."""
    pages, page_size = args.kv_cache.shape[:2]
    n = None
    if args.lengths is not None:
        n = args.lengths.long().cpu()
        most = None if args.indices is not None else args.capacity
        if int(n.min()) < 0 or (most is not None and int(n.max()) > most):
            needs = "at least 0" if most is None else f"0 to {most}"
            raise InputError(f"{op}: lengths reach from {int(n.min())} to {int(n.max())}; needs {needs}.")
    if args.indices is not None:
        entries = args.indices.cpu()
        if n is not None:
            entries = entries[(torch.arange(entries.shape[2]) < n[:, None, None]).expand_as(entries)]
        if entries.numel() and (int(entries.min()) < -1 or int(entries.max()) >= pages * page_size):
            raise InputError(
                f"{op}: indices reach from {int(entries.min())} to {int(entries.max())}; needs slots from 0 to "
                f"{pages * page_size - 1}, or -1 for none."
            )
    elif args.block_table is not None and n is not None:
        used = torch.arange(args.block_table.shape[1]) * page_size < n[:, None]
        entries = args.block_table.cpu()[used]
        if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= pages):
            raise InputError(
                f"{op}: the pages in use reach from {int(entries.min())} to {int(entries.max())} in block_table; "
                f"needs 0 to {pages - 1}."
            )
