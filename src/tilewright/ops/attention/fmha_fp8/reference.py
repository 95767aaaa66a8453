"""Attention over float8 in plain torch, from the raw arguments: the oracle on float64, and on e4m3 the rounding points
that kernels share.

It works on blocks of queries, so that scores never fill the memory.
"""

import math

import torch
from torch import Tensor

from tilewright.ops.attention.blocks import allowed, products, row_blocks
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK, SHIFT
from tilewright.ops.attention.layout import laid_like
from tilewright.ops.quant.numbers import E4M3

_BLOCK = 1 << 26
"""Scores computed at once: 256 MiB in float32, and a handful of such tensors live together."""


def attention(args: FmhaFp8Args) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments.

    Operands of another type than e4m3 are not rounded in between: float64 gives float64, whatever `out_dtype` says, and
    float32 operands are e4m3 ones upcast.
    """
    q, k, v = args.q, args.k, args.v
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = acc_dtype if acc_dtype == torch.float64 else args.out_dtype
    scaled = ((q, args.q_scale), (k, args.k_scale), (v, args.v_scale))
    rows, keys, values = (t.to(acc_dtype) * of_tokens(scales, t.shape[2]) for t, scales in scaled)
    (batch, heads, s_q, _), s_k = q.shape, k.shape[2]
    key_positions = torch.arange(s_k, device=q.device)
    outs, logs = [], []
    for start, end in row_blocks(q, s_k, _BLOCK):
        s = args.scale * products(rows[:, :, start:end], keys.mT)
        if args.softcap:
            s = args.softcap * torch.tanh(s / args.softcap)
        positions = torch.arange(start, end, device=q.device) + (s_k - s_q)
        visible = allowed(positions, key_positions, args.mask, batch, heads)
        if visible is not None:
            s = s.masked_fill(~visible, -math.inf)
        row_max = s.amax(-1, keepdim=True) if s_k else s.new_full((*s.shape[:3], 1), -math.inf)
        sink = None if args.sinks is None else args.sinks.to(acc_dtype)[:, None, None]
        base = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key: its terms are exp(-inf) = 0
        p = torch.exp(s - base)
        l_i = p.sum(-1, keepdim=True)
        if q.dtype == E4M3:
            p = (p * 2.0**SHIFT).to(E4M3).to(acc_dtype) * 2.0**-SHIFT
        log = base + torch.log(l_i)
        if sink is not None:
            log = torch.logaddexp(log, sink)
        share = torch.exp(base - log.masked_fill(log == -math.inf, 0.0))
        outs.append((products(p, values) * share).to(out_dtype))
        logs.append(log.squeeze(-1))
    if not outs:
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=out_dtype), q.new_empty(q.shape[:3], dtype=acc_dtype)
    return laid_like(torch.cat(outs, 2), q), torch.cat(logs, 2)


def of_tokens(scales: Tensor, tokens: int) -> Tensor:
    """Scales (B, H, blocks) as one a token, (B, H, tokens, 1); or (B, H, 1, 1) where there is one for all."""
    if scales.shape[2] == 1:
        return scales[..., None]
    return scales.repeat_interleave(SCALE_BLOCK, 2)[:, :, :tokens, None]
