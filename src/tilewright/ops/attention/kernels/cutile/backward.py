"""Attention backward in cuTile, of `fmha`: one kernel for dq, one for dk and dv, deterministic.

Both recompute S = Q K^T and dP = dO V^T: 14 * B * H * pairs * D flops, where one kernel that adds dq across blocks
needs 10.  (2, 16, 8192, 128) without a mask cannot beat 3.9 ms at 989 TFLOP/s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.cutile_launch import Hints
from tilewright.jit.tape import scratch
from tilewright.ops.attention.arguments import FmhaBackwardArgs
from tilewright.ops.attention.bucket import CAUSAL, FmhaBucket, backward_bucket
from tilewright.ops.attention.fmha import BACKWARD
from tilewright.ops.attention.kernels.cutile.backward_kernel import keys_kernel, queries_kernel, sinks_kernel
from tilewright.ops.attention.kernels.cutile.forward import heads_together, padded, why_not_operands
from tilewright.ops.attention.kernels.cutile.tiles import LOG2E

_SUMMED = 1024  # rows per step of the sum over rows


class Config(NamedTuple):
    """queries_*: the kernel for dq; keys_*: the kernel for dk and dv.   m, n: queries and keys of a tile; num_warps:
    consumer warps, 4 or 8, and 4 more load; occupancy: blocks per SM.
    """

    queries_m: int
    queries_n: int
    queries_num_warps: int
    queries_occupancy: int
    keys_m: int
    keys_n: int
    keys_num_warps: int
    keys_occupancy: int


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """The first candidate."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Pairs that compile without spills for sm_90 under a causal mask."""
    widest = max(padded(bucket.D), padded(bucket.D_v))
    queries: tuple[tuple[int, int, int, int], ...]
    keys: tuple[tuple[int, int, int, int], ...]
    if widest <= 64:
        queries = ((64, 128, 4, 2), (128, 128, 8, 1), (64, 64, 4, 2))
        keys = ((64, 128, 8, 1), (64, 64, 4, 2))
    elif widest <= 128:
        queries = ((64, 64, 4, 2), (128, 128, 8, 1), (128, 64, 8, 1))
        keys = ((64, 128, 8, 1),)
    else:
        queries, keys = ((64, 64, 4, 1), (64, 64, 8, 1)), ((64, 64, 8, 1),)
    return tuple(Config(*q, *k) for k in keys for q in queries)


CONFIGS = tuple(configure(FmhaBucket(32, 1, 8192, 8192, d, d, CAUSAL, 0, 1), torch.bfloat16) for d in (64, 128, 256))


def why_not(args: FmhaBackwardArgs) -> str | None:
    return why_not_operands(backward_bucket(args), args.q, args.v)


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config) -> None:
    (dq, dk, dv, dsinks), scale, softcap = outs, args.scale, args.softcap
    do, dlse, q, k, v, o, lse, slopes = args.do, args.dlse, args.q, args.k, args.v, args.o, args.lse, args.slopes
    batch, heads, s_q, d = q.shape
    kv_heads, s_k, d_v = v.shape[1:]
    left, right = args.mask.clamped_band(s_q, s_k)
    group, itemsize = heads // kv_heads, q.element_size()
    delta = scratch(tuple(lse.shape), dtype=lse.dtype, device=lse.device)
    any_slopes = lse if slopes is None else slopes  # a placeholder that is not read
    # Scalars of the score in units of log2: exp2(inner * s), or exp2(cap * tanh(inner * s))
    scalars = (scale, scale / softcap if softcap > 0 else scale * LOG2E, softcap * LOG2E, left, right)
    bounded = (left >= 0, right >= 0)
    c = config
    queries_kernel(
        (-(-s_q // c.queries_m) * heads * batch,),
        (
            *(dq, delta, do, o, lse if dlse is None else dlse, q, k, v, lse, any_slopes, *scalars),
            heads_together(heads * batch, group, s_k * (d + d_v) * itemsize),
        ),
        (
            *(padded(d), padded(d_v), c.queries_m, c.queries_n, *bounded, s_k % c.queries_n != 0),
            *(softcap > 0, slopes is not None, dlse is not None),
        ),
        Hints(c.queries_num_warps, c.queries_occupancy),
    )
    keys_kernel(
        (-(-s_k // c.keys_n) * kv_heads * batch,),
        (
            *(dk, dv, do, q, k, v, lse, delta, any_slopes, *scalars),
            heads_together(kv_heads * batch, 1, group * s_q * (d + d_v) * itemsize),
        ),
        (padded(d), padded(d_v), c.keys_m, c.keys_n, *bounded, softcap > 0, slopes is not None),
        Hints(c.keys_num_warps, c.keys_occupancy),
    )
    if args.sinks is not None:
        sinks_kernel((heads,), (dsinks, delta, lse, args.sinks), (_SUMMED,), Hints(4))
