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
"""Scores computed at once: 256 MiB in float32, and a handful of such tensors live together."""


class Options(NamedTuple):
    """The raw op's arguments after q, k and v."""

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
        result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, *options)
        return result
    return _forward(q, k, v, options)


def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); the last is empty without sinks.  rest: the fields of `Options`.

    Differentiable where one of the tensors requires a gradient: in steps of torch, through o and lse too.
    """
    options = Options(*rest)
    acc_dtype, sinks = lse.dtype, options.sinks
    differentiable = level_is_open() or _wants_grad(do, dlse, q, k, v, o, lse, sinks)
    # cuDNN and FLASH add to dq in an order that varies
    own_steps = dlse is not None or differentiable or current_numerics() == "deterministic"
    vendor_kernels = None if own_steps else _vendor(q, k, v, options)
    if vendor_kernels is not None and sinks is None:  # saves a pass over do and o
        dq, dk, dv = vendor_kernels.backward(do, q, k, v, o, lse, options.left, options.right, options.scale)
        return dq, dk, dv, lse.new_empty(0)
    delta = (do.to(acc_dtype) * o.to(acc_dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    if vendor_kernels is not None:
        dq, dk, dv = vendor_kernels.backward(do, q, k, v, o, lse, options.left, options.right, options.scale)
    else:
        dq, dk, dv = _backward(do, delta, q, k, v, lse, options)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    p_sink = torch.exp(sinks.to(acc_dtype)[:, None] - lse)  # lse >= sink, so never NaN
    return dq, dk, dv, -(p_sink * delta).sum((0, 2)).to(sinks.dtype)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    vendor_kernels = None if level_is_open() else _vendor(q, k, v, options)
    if vendor_kernels is not None:
        o, lse = vendor_kernels.forward(q, k, v, options.left, options.right, options.scale)
        return (o, lse) if options.sinks is None else _with_sinks(o, lse, options.sinks)
    blocks = [_forward_block(q, k, v, block, options) for block in _blocks(q, k, options)]
    if not blocks:
        acc_dtype = accumulate_dtype(q.dtype)
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype)
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
    """Scores of one block, (B, H, rows, keys): with slopes and mask (-inf), and before both; and the mask."""

    masked: Tensor
    capped: Tensor
    allowed: Tensor | None


def _scores(q: Tensor, k: Tensor, block: _Block, s_q: int, s_k: int, options: Options) -> _Scores:
    """Scores of a block.  q: its rows, k: its keys, both in the accumulation dtype."""
    s = options.scale * products(q, k.mT)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    capped = s
    positions = torch.arange(block.start, block.end, device=q.device) + (s_k - s_q)
    keys = torch.arange(block.first, block.last, device=q.device)
    if options.slopes is not None:
        s = s - options.slopes.to(s.dtype)[:, None, None] * (positions[:, None] - keys).abs()
    visible = allowed(
        positions, keys, options.mask_data, options.program, options.left, options.right, q.shape[0], q.shape[1]
    )
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    return _Scores(s, capped, visible)


def _forward_block(q: Tensor, k: Tensor, v: Tensor, block: _Block, options: Options) -> tuple[Tensor, Tensor]:
    acc_dtype = accumulate_dtype(q.dtype)
    rows = q[:, :, block.start : block.end].to(acc_dtype)
    keys, values = (t[:, :, block.first : block.last] for t in (k, v))
    s = _scores(rows, keys.to(acc_dtype), block, q.shape[2], k.shape[2], options).masked
    if s.shape[-1]:
        row_max = s.amax(-1, keepdim=True)
    else:
        row_max = s.new_full((*s.shape[:-1], 1), -math.inf)
    sinks = None if options.sinks is None else options.sinks.to(acc_dtype)[:, None, None]
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key: its terms are exp(-inf) = 0
    p = torch.exp(s - row_max)
    l_i = p.sum(-1, keepdim=True)
    if sinks is not None:
        l_i = l_i + torch.exp(sinks - row_max)
    acc = products(p.to(v.dtype).to(acc_dtype), values.to(acc_dtype))
    o = (acc / l_i.masked_fill(l_i == 0, 1.0)).to(q.dtype)
    return o, (row_max + torch.log(l_i)).squeeze(-1)


def _backward(
    do: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    acc_dtype = lse.dtype
    dq = []
    dk, dv = torch.zeros_like(k, dtype=acc_dtype), torch.zeros_like(v, dtype=acc_dtype)
    for block in _blocks(q, k, options):
        q_slice, k_slice = slice(block.start, block.end), slice(block.first, block.last)
        rows, out = q[:, :, q_slice].to(acc_dtype), do[:, :, q_slice].to(acc_dtype)
        keys, values = k[:, :, k_slice].to(acc_dtype), v[:, :, k_slice].to(acc_dtype)
        s, capped, visible = _scores(rows, keys, block, q.shape[2], k.shape[2], options)
        row_lse = lse[:, :, q_slice, None]
        p = torch.exp(s - row_lse.masked_fill(row_lse == -math.inf, 0.0))
        ds = p * (products(out, values.mT) - delta[:, :, q_slice, None])
        if options.softcap:
            ds = ds * (1.0 - (capped / options.softcap) ** 2)
        if visible is not None:
            ds = ds.masked_fill(~visible, 0.0)
        ds = ds.to(q.dtype).to(acc_dtype)
        dq.append((options.scale * products(ds, keys)).to(q.dtype))
        dk[:, :, k_slice] += options.scale * _sums(ds, rows, k.shape[1])
        dv[:, :, k_slice] += _sums(p.to(v.dtype).to(acc_dtype), out, v.shape[1])
    result = torch.cat(dq, 2) if dq else torch.zeros_like(q)
    return laid_like(result, q), laid_like(dk.to(k.dtype), k), laid_like(dv.to(v.dtype), v)


def _sums(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """a (B, H, M, K)^T @ b (B, H, M, N), summed over the query heads of each key head: (B, H_kv, K, N)."""
    batch, heads, m, _ = a.shape
    folded = (t.reshape(batch, kv_heads, heads // kv_heads * m, t.shape[3]) for t in (a, b))
    left, right = folded
    return left.mT @ right


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of a softmax after the sinks join its denominator."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (o * torch.exp(lse - joined)[..., None]).to(o.dtype), joined


def _vendor(q: Tensor, k: Tensor, v: Tensor, options: Options) -> vendor.Kernels | None:
    """Whoever computes this band, if any.  Sinks only join the denominator."""
    plain = options.slopes is None and options.softcap == 0.0
    return vendor.kernels(q, k, v, options.program, options.left, options.right, plain)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context with autocast off; a null context on a device without autocast (meta)."""
    return torch.autocast(device, enabled=False) if device in AUTOCASTS else nullcontext()


class _Attention(Function):
    """The forward with its own backward: torch's graph would keep the scores of every block, and round gradients
    at other points than kernels do.
    """

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
            *result, dsinks = attention_backward(do, dlse, q, k, v, o, lse, sinks, slopes, mask_data, *ctx.rest)
        grads = [*result, dsinks if sinks is not None else None]
        return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), *(None,) * 7)
