"""Attention over float8 in plain torch, from the raw arguments: the oracle on float64, and on e4m3 the rounding points
that kernels share.

It works on blocks of queries, so that scores never fill the memory.
"""

import math

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.mask import evaluate
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK, SHIFT
from tilewright.ops.attention.layout import laid_like
from tilewright.ops.quant.numbers import E4M3

_BLOCK = 1 << 26
"""Scores computed at one time: 256 MiB in float32, of which a handful live together."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    sinks: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments.

    Operands of another type than e4m3 are not rounded in between: float64 gives float64, whatever `out_dtype` says, and
    float32 operands are e4m3 ones upcast.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = wide if wide == torch.float64 else out_dtype
    rows, keys, values = (t.to(wide) * of_tokens(s, t.shape[2]) for t, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
    (batch, heads, s_q, _), s_k = q.shape, k.shape[2]
    made, logs = [], []
    for start, end in _blocks(q, s_q, batch * heads * s_k):
        s = scale * _products(rows[:, :, start:end], keys.mT)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        positions = torch.arange(start, end, device=q.device) + (s_k - s_q)
        seen = _allowed(positions, s_k, mask_data, program, left, right, batch, heads)
        if seen is not None:
            s = s.masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True) if s_k else s.new_full((*s.shape[:3], 1), -math.inf)
        sink = None if sinks is None else sinks.to(wide)[:, None, None]
        base = top.masked_fill(top == -math.inf, 0.0)  # of a row that sees nothing: its terms are exp(-inf) = 0
        p = torch.exp(s - base)
        total = p.sum(-1, keepdim=True)
        if q.dtype == E4M3:
            p = (p * 2.0**SHIFT).to(E4M3).to(wide) * 2.0**-SHIFT
        log = base + torch.log(total)
        if sink is not None:
            log = torch.logaddexp(log, sink)
        share = torch.exp(base - log.masked_fill(log == -math.inf, 0.0))
        made.append((_products(p, values) * share).to(out_dtype))
        logs.append(log.squeeze(-1))
    if not made:
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=out_dtype), q.new_empty(q.shape[:3], dtype=wide)
    return laid_like(torch.cat(made, 2), q), torch.cat(logs, 2)


def of_tokens(scales: Tensor, tokens: int) -> Tensor:
    """Scales (B, H, blocks) as one a token, (B, H, tokens, 1); or (B, H, 1, 1) where there is one for all."""
    if scales.shape[2] == 1:
        return scales[..., None]
    return scales.repeat_interleave(SCALE_BLOCK, 2)[:, :, :tokens, None]


def _blocks(q: Tensor, s_q: int, a_row: int) -> list[tuple[int, int]]:
    """Queries start .. end, `_BLOCK` scores or one row at a time."""
    a_row = hint(a_row)
    # One block also where nothing is computed (meta); and no guard here but on a size that is none
    if q.is_meta or a_row * hint(s_q) <= _BLOCK:
        return [(0, s_q)] if s_q else []
    height = max(_BLOCK // a_row, 1)
    return [(start, min(start + height, s_q)) for start in range(0, s_q, height)]


def _allowed(
    positions: Tensor, s_k: int, mask_data: Tensor | None, program: str, left: int, right: int, batch: int, heads: int
) -> Tensor | None:
    """bool, broadcastable to (B, H, positions, s_k); None where everything is allowed."""
    keys = torch.arange(s_k, device=positions.device)
    if mask_data is not None:
        return evaluate(program, mask_data, positions, keys, batch, heads)
    if left < 0 and right < 0:
        return None
    distance = positions[:, None] - keys
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = seen & (distance <= left)
    if right >= 0:
        seen = seen & (distance >= -right)
    return seen


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a (B, H, M, K) @ b (B, H_kv, K, N): query heads that share a key head are rows of one product."""
    batch, heads, m, _ = a.shape
    folded = a.reshape(batch, b.shape[1], heads // b.shape[1] * m, a.shape[3])
    return (folded @ b).view(batch, heads, m, b.shape[3])
