"""Checks of the arguments of `rope_kv_append_`."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import checks

OP = "rope_kv_append_"


def check(args: Any) -> None:
    """Raise InputError for what the docstring of `rope_kv_append_` excludes.   args: RopeKvAppendArgs."""
    q, k, v, cache = args.q, args.k, args.v, args.k_cache
    checks.check_caches(OP, cache, args.v_cache, args.k_scale, args.v_scale)
    checks.check_tensors(OP, cache, q=q, k=k, v=v)
    tokens = q.shape[0] if q.dim() else 0
    checks.check_packed(OP, cache, tokens, q=q, k=k, v=v)
    checks.check_fits(OP, "k", k, cache)
    checks.check_fits(OP, "v", v, args.v_cache)
    if q.shape[2] != k.shape[2] or 0 in (q.shape[2], v.shape[2]):
        raise InputError(
            f"{OP}: q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; needs one D of q and k, at least 2, "
            "and D_v at least 1."
        )
    checks.check_sequences(OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    _check_tables(q, args.cos, args.sin, args.rotary_dim)
    _check_weights(q, args.q_weight, args.k_weight)
    checks.check_integers(OP, cache, positions=(args.positions, (tokens,)))
    checks.check_numbers(OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    _check_rows(args.cos, args.lengths, args.positions)


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    checks.check_tensors(OP, q, cos=cos, sin=sin)
    rows.check_floating(OP, cos=cos, sin=sin)
    rows.check_same(OP, cos=cos, sin=sin)
    if cos.dim() != 2 or cos.dtype == torch.float64:
        raise InputError(f"{OP}: cos is {tuple(cos.shape)} {cos.dtype}; needs a table (P, W) of at most float32.")
    width, d = cos.shape[1], q.shape[2]
    r = rotary_dim or width
    if r % 2 or not 2 <= r <= d or (width != r and 2 * width != r):
        raise InputError(
            f"{OP}: cos has {width} columns, rotary_dim is {rotary_dim or None}, D is {d}; needs an even rotary_dim "
            "(default: the columns of cos) from 2 to D, and as many columns or half as many."
        )


def _check_weights(q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    checks.check_tensors(OP, q, q_weight=q_weight, k_weight=k_weight)
    if (q_weight is None) != (k_weight is None):
        raise InputError(f"{OP}: one of q_weight and k_weight is None; needs both, or neither.")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != q.shape[2:] or weight.dtype != q.dtype):
            raise InputError(
                f"{OP}: {name} is {tuple(weight.shape)} {weight.dtype}; needs ({q.shape[2]},) {q.dtype}, as q."
            )


def _check_rows(cos: Tensor, lengths: Tensor, positions: Tensor | None) -> None:
    """Every angle stands in the table."""
    indices = lengths - 1 if positions is None and checks.may_read(lengths) else positions
    if indices is None or not indices.numel() or not checks.may_read(indices):
        return
    low, high = (int(n) for n in indices.aminmax())
    if high >= cos.shape[0] or (positions is not None and low < 0):
        first = max(low, 0) if positions is None else low
        raise InputError(
            f"{OP}: positions reach from {first} to {high}; the table has rows 0 to {cos.shape[0] - 1}. "
            "Make a longer table."
        )
