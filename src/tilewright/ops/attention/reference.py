"""Attention in plain torch, from the raw arguments: the oracle on float64, and on other types the rounding points that
kernels share.

It works on blocks of queries, so that scores never fill the memory; each block sees only the keys of its band.  On a
GPU, what cuDNN or FLASH express goes to them (`vendor.py`) unless it is small.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import Function, level_is_open
from tilewright.dispatch.preference import current_numerics, numerics
from tilewright.hardware.autocast import AUTOCASTS
from tilewright.ops.attention import vendor
from tilewright.ops.attention.blocks import allowed, products, row_blocks
from tilewright.ops.attention.layout import laid_like
from tilewright.ops.rows import accumulate_dtype

_BLOCK = 1 << 26
"""Scores computed at one time: 256 MiB in float32, of which a handful live together."""


class Options(NamedTuple):
    """What all steps of one call share: the raw op's arguments behind q, k and v."""

    sinks: Tensor | None
    slopes: Tensor | None
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments; differentiable in q, k, v and sinks."""
    options = Options(sinks, slopes, mask_data, program, left, right, scale, softcap)
    if _wants_grad(q, k, v, sinks) and not level_is_open():  # torch's own steps have forward-mode derivatives
        made: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, *options)
        return made
    return _forward(q, k, v, options)


def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); the last is empty without sinks.  rest: the fields of `Options`.

    Differentiable where one of the tensors requires a gradient: in steps of torch, through o and lse too.
    """
    options = Options(*rest)
    wide, sinks = lse.dtype, options.sinks
    differentiable = level_is_open() or _wants_grad(do, dlse, q, k, v, o, lse, sinks)
    # cuDNN and FLASH add to dq in any order
    own_steps = dlse is not None or differentiable or current_numerics() == "deterministic"
    theirs = None if own_steps else _vendor(q, k, v, options)
    if theirs is not None and sinks is None:  # a pass over do and o less
        dq, dk, dv = theirs.backward(do, q, k, v, o, lse, options.left, options.right, options.scale)
        return dq, dk, dv, lse.new_empty(0)
    delta = (do.to(wide) * o.to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    if theirs is not None:
        dq, dk, dv = theirs.backward(do, q, k, v, o, lse, options.left, options.right, options.scale)
    else:
        dq, dk, dv = _backward(do, delta, q, k, v, lse, options)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    share = torch.exp(sinks.to(wide)[:, None] - lse)  # of the denominator; lse is at least the sink, so never NaN
    return dq, dk, dv, -(share * delta).sum((0, 2)).to(sinks.dtype)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    theirs = None if level_is_open() else _vendor(q, k, v, options)
    if theirs is not None:
        o, lse = theirs.forward(q, k, v, options.left, options.right, options.scale)
        return (o, lse) if options.sinks is None else _with_sinks(o, lse, options.sinks)
    blocks = [_forward_block(q, k, v, block, options) for block in _blocks(q, k, options)]
    if not blocks:
        wide = accumulate_dtype(q.dtype)
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)
    o, lse = (torch.cat(parts, 2) if len(blocks) > 1 else parts[0] for parts in zip(*blocks, strict=True))
    return laid_like(o, q), lse


class _Block(NamedTuple):
    """Queries start .. end, and the keys first .. last that any of them may see."""

    start: int
    end: int
    first: int
    last: int


def _blocks(q: Tensor, k: Tensor, options: Options) -> Iterator[_Block]:
    """All queries, `_BLOCK` scores or one row at a time."""
    s_q, s_k = q.shape[2], k.shape[2]
    blocks = list(row_blocks(q, s_k, _BLOCK))
    for start, end in blocks:
        first, last = 0, s_k
        if len(blocks) > 1 and options.left >= 0:
            first = min(max(start + s_k - s_q - options.left, 0), s_k)
        if len(blocks) > 1 and options.right >= 0:
            last = max(min(end + s_k - s_q + options.right, s_k), first)
        yield _Block(start, end, first, last)


class _Scores(NamedTuple):
    """Of one block, (B, H, rows, keys): scores with -inf where nothing is allowed, and before slopes and mask."""

    masked: Tensor
    capped: Tensor
    allowed: Tensor | None


def _scores(q: Tensor, k: Tensor, block: _Block, s_q: int, s_k: int, options: Options) -> _Scores:
    """q: rows of the block, k: its keys, both wide."""
    s = options.scale * products(q, k.mT)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    capped = s
    positions = torch.arange(block.start, block.end, device=q.device) + (s_k - s_q)
    keys = torch.arange(block.first, block.last, device=q.device)
    if options.slopes is not None:
        s = s - options.slopes.to(s.dtype)[:, None, None] * (positions[:, None] - keys).abs()
    seen = allowed(
        positions, keys, options.mask_data, options.program, options.left, options.right, q.shape[0], q.shape[1]
    )
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    return _Scores(s, capped, seen)


def _forward_block(q: Tensor, k: Tensor, v: Tensor, block: _Block, options: Options) -> tuple[Tensor, Tensor]:
    wide = accumulate_dtype(q.dtype)
    rows = q[:, :, block.start : block.end].to(wide)
    keys, values = (t[:, :, block.first : block.last] for t in (k, v))
    s = _scores(rows, keys.to(wide), block, q.shape[2], k.shape[2], options).masked
    if s.shape[-1]:
        top = s.amax(-1, keepdim=True)
    else:
        top = s.new_full((*s.shape[:-1], 1), -math.inf)
    sinks = None if options.sinks is None else options.sinks.to(wide)[:, None, None]
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)  # of a row that sees nothing: its terms are exp(-inf) = 0
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    summed = products(p.to(v.dtype).to(wide), values.to(wide))
    o = (summed / total.masked_fill(total == 0, 1.0)).to(q.dtype)
    return o, (top + torch.log(total)).squeeze(-1)


def _backward(
    do: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    wide = lse.dtype
    dq = []
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _blocks(q, k, options):
        at, inside = slice(block.start, block.end), slice(block.first, block.last)
        rows, out = q[:, :, at].to(wide), do[:, :, at].to(wide)
        keys, values = k[:, :, inside].to(wide), v[:, :, inside].to(wide)
        s, capped, seen = _scores(rows, keys, block, q.shape[2], k.shape[2], options)
        level = lse[:, :, at, None]
        p = torch.exp(s - level.masked_fill(level == -math.inf, 0.0))
        ds = p * (products(out, values.mT) - delta[:, :, at, None])
        if options.softcap:
            ds = ds * (1.0 - (capped / options.softcap) ** 2)
        if seen is not None:
            ds = ds.masked_fill(~seen, 0.0)
        ds = ds.to(q.dtype).to(wide)
        dq.append((options.scale * products(ds, keys)).to(q.dtype))
        dk[:, :, inside] += options.scale * _sums(ds, rows, k.shape[1])
        dv[:, :, inside] += _sums(p.to(v.dtype).to(wide), out, v.shape[1])
    made = torch.cat(dq, 2) if dq else torch.zeros_like(q)
    return laid_like(made, q), laid_like(dk.to(k.dtype), k), laid_like(dv.to(v.dtype), v)


def _sums(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """a (B, H, M, K)^T @ b (B, H, M, N), summed over the query heads of each key head: (B, H_kv, K, N)."""
    batch, heads, m, _ = a.shape
    folded = (t.reshape(batch, kv_heads, heads // kv_heads * m, t.shape[3]) for t in (a, b))
    left, right = folded
    return left.mT @ right


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """What a softmax without them becomes when sinks join its denominator."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (o * torch.exp(lse - joined)[..., None]).to(o.dtype), joined


def _vendor(q: Tensor, k: Tensor, v: Tensor, options: Options) -> vendor.Kernels | None:
    """Whoever computes this band, if any.  Sinks only join the denominator."""
    plain = options.slopes is None and options.softcap == 0.0
    return vendor.kernels(q, k, v, options.program, options.left, options.right, plain)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Autocast off; on a device that has none (meta), nothing."""
    return torch.autocast(device, enabled=False) if device in AUTOCASTS else nullcontext()


class _Attention(Function):
    """torch's own graph would keep the scores of every block, and round its gradients elsewhere than kernels do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, Options(*options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.rest, ctx.numerics = inputs[6:], current_numerics()

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, slopes, mask_data, o, lse = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 11
        do = torch.zeros_like(o) if do is None else do.to(o.dtype)
        with _without_autocast(q.device.type), numerics(ctx.numerics):
            *made, dsinks = attention_backward(do, dlse, q, k, v, o, lse, sinks, slopes, mask_data, *ctx.rest)
        grads = [*made, dsinks if sinks is not None else None]
        return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), *(None,) * 7)
