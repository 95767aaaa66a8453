"""Attention in plain torch, from the raw arguments: the oracle on float64, and on other types the rounding points that
kernels share.

It works on blocks of queries, so that scores never fill the memory; each block sees only the keys of its band.  On a
GPU, what cuDNN, FLASH or EFFICIENT express goes to them (`vendor.py`) unless it is small.
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
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs, MaskArgs
from tilewright.ops.attention.blocks import allowed, products, row_blocks
from tilewright.ops.attention.dropped import Dropout, kept
from tilewright.ops.attention.layout import laid_like
from tilewright.ops.rows import accumulate_dtype

_BLOCK = 1 << 26
"""Scores computed at once: 256 MiB in float32, and a handful of such tensors live together."""


def attention(args: FmhaArgs, dropout: Dropout | None = None) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments; differentiable in q, k, v and sinks.  lse is that before dropout."""
    if _wants_grad(args.q, args.k, args.v, args.sinks) and not level_is_open():
        # torch's own steps have forward-mode derivatives
        result: tuple[Tensor, Tensor] = _Attention.apply(*args, *(dropout or _NOTHING))
        return result
    return _forward(args, dropout)


def attention_backward(args: FmhaBackwardArgs, dropout: Dropout | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); the last is empty without sinks.

    Differentiable where one of the tensors requires a gradient: in steps of torch, through o and lse too.
    """
    do, dlse, o, lse, sinks = args.do, args.dlse, args.o, args.lse, args.sinks
    acc_dtype = lse.dtype
    differentiable = level_is_open() or _wants_grad(do, dlse, args.q, args.k, args.v, o, lse, sinks)
    # cuDNN and FLASH add to dq in an order that varies
    own_steps = dropout is not None or dlse is not None or differentiable or current_numerics() == "deterministic"
    vendor_kernels = None if own_steps else vendor.kernels(args.forward)
    vendor_backward = None if vendor_kernels is None else vendor_kernels.backward
    if vendor_backward is not None and sinks is None:  # saves a pass over do and o
        dq, dk, dv = vendor_backward(args)
        return dq, dk, dv, lse.new_empty(0)
    delta = (do.to(acc_dtype) * o.to(acc_dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    if vendor_backward is not None:
        dq, dk, dv = vendor_backward(args)
    else:
        dq, dk, dv = _backward(args.forward, do, delta, lse, dropout)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    p_sink = torch.exp(sinks.to(acc_dtype)[:, None] - lse)  # lse >= sink, so never NaN
    return dq, dk, dv, -(p_sink * delta).sum((0, 2)).to(sinks.dtype)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward(args: FmhaArgs, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    q = args.q
    vendor_kernels = None if dropout is not None or level_is_open() else vendor.kernels(args)
    if vendor_kernels is not None:
        o, lse = vendor_kernels.forward(args)
        return (o, lse) if args.sinks is None else _with_sinks(o, lse, args.sinks)
    blocks = [_forward_block(args, block, dropout) for block in _blocks(args)]
    if not blocks:
        acc_dtype = accumulate_dtype(q.dtype)
        return q.new_empty(*q.shape[:3], args.v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype)
    o, lse = (torch.cat(parts, 2) if len(blocks) > 1 else parts[0] for parts in zip(*blocks, strict=True))
    return laid_like(o, q), lse


class _Block(NamedTuple):
    """Queries start .. end, and the keys first .. last that any of them may see."""

    start: int
    end: int
    first: int
    last: int


def _blocks(args: FmhaArgs) -> Iterator[_Block]:
    """All queries, `_BLOCK` scores or one row at a time."""
    s_q, s_k = args.q.shape[2], args.k.shape[2]
    blocks = list(row_blocks(args.q, s_k, _BLOCK))
    for start, end in blocks:
        first, last = 0, s_k
        if len(blocks) > 1 and args.left >= 0:
            first = min(max(start + s_k - s_q - args.left, 0), s_k)
        if len(blocks) > 1 and args.right >= 0:
            last = max(min(end + s_k - s_q + args.right, s_k), first)
        yield _Block(start, end, first, last)


class _Scores(NamedTuple):
    """Scores of one block, (B, H, rows, keys): with slopes and mask (-inf), and before both; and the mask."""

    masked: Tensor
    capped: Tensor
    allowed: Tensor | None


def _scores(args: FmhaArgs, block: _Block, rows: Tensor, keys: Tensor) -> _Scores:
    """Scores of a block.  rows: of q, keys: of k, both in the accumulation dtype."""
    (batch, heads, s_q, _), s_k = args.q.shape, args.k.shape[2]
    s = args.scale * products(rows, keys.mT)
    if args.softcap:
        s = args.softcap * torch.tanh(s / args.softcap)
    capped = s
    positions = torch.arange(block.start, block.end, device=rows.device) + (s_k - s_q)
    key_positions = torch.arange(block.first, block.last, device=rows.device)
    if args.slopes is not None:
        s = s - args.slopes.to(s.dtype)[:, None, None] * (positions[:, None] - key_positions).abs()
    visible = allowed(positions, key_positions, args.mask, batch, heads)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    return _Scores(s, capped, visible)


def _kept(args: FmhaArgs, block: _Block, dropout: Dropout | None) -> Tensor | None:
    """bool (B, H, rows, keys): which probabilities of a block stay; None: all."""
    if dropout is None:
        return None
    device = args.q.device
    queries, keys = (torch.arange(*ends, device=device) for ends in (block[:2], block[2:]))
    return kept(dropout, args.q.shape[0], args.q.shape[1], queries, keys)


def _zeroed(x: Tensor, keep: Tensor | None) -> Tensor:
    """0 where `keep` is False."""
    return x if keep is None else x.masked_fill(~keep, 0.0)


def _forward_block(args: FmhaArgs, block: _Block, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    q, v = args.q, args.v
    acc_dtype = accumulate_dtype(q.dtype)
    rows = q[:, :, block.start : block.end].to(acc_dtype)
    keys, values = (t[:, :, block.first : block.last] for t in (args.k, v))
    s = _scores(args, block, rows, keys.to(acc_dtype)).masked
    if s.shape[-1]:
        row_max = s.amax(-1, keepdim=True)
    else:
        row_max = s.new_full((*s.shape[:-1], 1), -math.inf)
    sinks = None if args.sinks is None else args.sinks.to(acc_dtype)[:, None, None]
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key: its terms are exp(-inf) = 0
    p = torch.exp(s - row_max)
    l_i = p.sum(-1, keepdim=True)
    if sinks is not None:
        l_i = l_i + torch.exp(sinks - row_max)
    p = _zeroed(p, _kept(args, block, dropout))
    acc = products(p.to(v.dtype).to(acc_dtype), values.to(acc_dtype))
    if dropout is not None:
        acc = dropout.scale * acc
    o = (acc / l_i.masked_fill(l_i == 0, 1.0)).to(q.dtype)
    return o, (row_max + torch.log(l_i)).squeeze(-1)


def _backward(
    args: FmhaArgs, do: Tensor, delta: Tensor, lse: Tensor, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, acc_dtype = args.q, args.k, args.v, lse.dtype
    dq = []
    dk, dv = torch.zeros_like(k, dtype=acc_dtype), torch.zeros_like(v, dtype=acc_dtype)
    for block in _blocks(args):
        q_slice, k_slice = slice(block.start, block.end), slice(block.first, block.last)
        rows, out = q[:, :, q_slice].to(acc_dtype), do[:, :, q_slice].to(acc_dtype)
        keys, values = k[:, :, k_slice].to(acc_dtype), v[:, :, k_slice].to(acc_dtype)
        s, capped, visible = _scores(args, block, rows, keys)
        row_lse = lse[:, :, q_slice, None]
        p = torch.exp(s - row_lse.masked_fill(row_lse == -math.inf, 0.0))
        keep = _kept(args, block, dropout)
        if dropout is not None:  # the factor of dp and of dv
            out = dropout.scale * out
        ds = p * (_zeroed(products(out, values.mT), keep) - delta[:, :, q_slice, None])
        if args.softcap:
            ds = ds * (1.0 - (capped / args.softcap) ** 2)
        if visible is not None:
            ds = ds.masked_fill(~visible, 0.0)
        ds = ds.to(q.dtype).to(acc_dtype)
        dq.append((args.scale * products(ds, keys)).to(q.dtype))
        dk[:, :, k_slice] += args.scale * _sums(ds, rows, k.shape[1])
        dv[:, :, k_slice] += _sums(_zeroed(p, keep).to(v.dtype).to(acc_dtype), out, v.shape[1])
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


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context with autocast off; a null context on a device without autocast (meta)."""
    return torch.autocast(device, enabled=False) if device in AUTOCASTS else nullcontext()


_NOTHING = (None, None, 0.0)
"""The fields of a `Dropout` that drops nothing."""


def _grouped(values: tuple[Any, ...]) -> tuple[FmhaArgs, Dropout | None]:
    """Arguments that stood one by one."""
    count = len(FmhaArgs._fields)
    seed, offset, p = values[count:]
    return FmhaArgs(*values[:count]), None if seed is None else Dropout(seed, offset, p)


class _Attention(Function):
    """The forward with its own backward: torch's graph would keep the scores of every block, and round gradients
    at other points than kernels do.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, Tensor]:
        return _forward(*_grouped(values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        args, dropout = _grouped(inputs)
        seed, offset, ctx.p = dropout or _NOTHING
        tensors = args.q, args.k, args.v, args.sinks, args.slopes, args.mask_data, seed, offset
        ctx.save_for_backward(*tensors, *output)
        ctx.mask, ctx.scale, ctx.softcap = args.mask._replace(mask_data=None), args.scale, args.softcap
        ctx.numerics = current_numerics()

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, slopes, mask_data, seed, offset, o, lse = ctx.saved_tensors
        result: dict[str, Tensor | None] = dict.fromkeys((*FmhaArgs._fields, *Dropout._fields))
        if do is None and dlse is None:
            return tuple(result.values())
        do = torch.zeros_like(o) if do is None else do.to(o.dtype)
        mask: MaskArgs = ctx.mask._replace(mask_data=mask_data)
        args = FmhaBackwardArgs(do, dlse, q, k, v, o, lse, sinks, slopes, *mask, ctx.scale, ctx.softcap)
        dropout = None if seed is None else Dropout(seed, offset, ctx.p)
        with _without_autocast(q.device.type), numerics(ctx.numerics):
            result["q"], result["k"], result["v"], dsinks = attention_backward(args, dropout)
        result["sinks"] = None if sinks is None else dsinks
        return tuple(grad if need else None for grad, need in zip(result.values(), ctx.needs_input_grad, strict=True))
