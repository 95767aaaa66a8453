"""Attention backward in Triton, of `fmha` and `fmha_varlen`: one kernel for dk and dv, one for dq, deterministic.
`mla.py` launches them with a second pair of score operands.

Both recompute S = Q K^T and dP = dO V^T: 14 * B * H * pairs * D flops, where one kernel that adds dq across programs
needs 10.  (2, 16, 8192, 128) without a mask cannot beat 3.9 ms at 989 TFLOP/s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.ops.attention import fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaBackwardArgs
from tilewright.ops.attention.bucket import CAUSAL, SOFTCAP, FmhaBucket
from tilewright.ops.attention.dropped import Dropout
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.backward_kernel import keys_kernel, queries_kernel
from tilewright.ops.attention.kernels.triton.delta import delta, sink_gradient
from tilewright.ops.attention.kernels.triton.forward import why_not_operands
from tilewright.ops.attention.kernels.triton.tiles import Tile

_keys, _queries = tiling.Looping(keys_kernel, "S_q"), tiling.Looping(queries_kernel, "S_k")


class Config(NamedTuple):
    """keys_*: the `Tile` for dk and dv; queries_*: the `Tile` for dq.   descriptors: load through TMA in both."""

    keys_m: int
    keys_n: int
    keys_warps: int
    keys_stages: int
    queries_m: int
    queries_n: int
    queries_warps: int
    queries_stages: int
    descriptors: bool

    @property
    def keys(self) -> Tile:
        return Tile(self.keys_m, self.keys_n, self.keys_warps, self.keys_stages)

    @property
    def queries(self) -> Tile:
        return Tile(self.queries_m, self.queries_n, self.queries_warps, self.queries_stages)


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """The tiles: dk and dv, or dq, and two tiles of scores must fit 255 registers.

    64 rows of both in four warps were the fastest for keys on an H200 at D = 128, and within 4 % for queries.
    """
    widest, terms = max(bucket.D, bucket.D_v), tiling.has_terms(bucket.mask, bucket.extras)  # terms need registers
    if dtype.itemsize == 4 and terms:
        return Config(16, 16, 4, 1, 32, 16, 4, 1, False) if widest <= 32 else Config(16, 16, 4, 2, 16, 32, 4, 2, False)
    if dtype.itemsize == 4:
        return Config(16, 32, 8, 2, 32, 16, 8, 2, False)
    if not bucket.aligned:
        return Config(32, 64 if widest <= 128 else 32, 8, 2, 64, 32, 8, 2, False)
    if widest <= 128:
        queries = 32 if widest > 64 and terms else 64
        return Config(queries, 64, 4, 2, 64, 64, 4, 2, True)
    return Config(32, 64, 8, 2, 64, 64, 8, 2, True)


CONFIGS = tuple(
    dict.fromkeys(
        configure(FmhaBucket(32, 1, 8192, 8192, d, d, CAUSAL, extras, aligned), dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for d in (64, 128, 256)
        for extras in (0, SOFTCAP)
        for aligned in (0, 1)
    )
)


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles of both kernels that compile for sm_90 with no spills, or with few."""
    widest = max(bucket.D, bucket.D_v)
    if dtype.itemsize == 4 or not bucket.aligned:
        return (configure(bucket, dtype),)
    keys: tuple[tuple[int, int, int, int], ...]
    queries: tuple[tuple[int, int, int, int], ...]
    if widest <= 64:
        keys = ((64, 64, 4, 2), (64, 128, 8, 2))
        queries = ((64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))
    elif widest <= 128:
        keys = ((64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2))
        queries = ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))
    else:
        keys, queries = ((32, 64, 8, 2),), ((64, 64, 8, 2), (128, 32, 8, 2))
    return tuple(Config(*k, *q, True) for k in keys for q in queries)


class Rope(NamedTuple):
    """The rope parts of mla: operands and their gradients."""

    q: Tensor  # (B, H, S_q, D_pe)
    k: Tensor  # (B, 1, S_k, D_pe)
    dq: Tensor  # as q
    dk: Tensor  # (B, H_kv, S_k, D_pe) float32, contiguous: the gradient per kv head


_NO_ROPE = (None,) * 4


def backward(
    outs: tuple[Tensor, ...],
    args: FmhaBackwardArgs,
    row_delta: Tensor,
    config: Config,
    pe: Rope | None = None,
    means: Tensor | None = None,
    dropout: Dropout | None = None,
) -> None:
    """Write dq, dk and dv.  row_delta: (B, H, S_q) float32; S_k >= 1.  With sinks lse includes them.

    means: (B, H, S_q) float32: rowsum(P * dP), which is delta + dlse without the rounding of o.
    """
    dq, dk, dv = outs[:3]
    do, q, k, v, mask, softcap = args.do, args.q, args.k, args.v, args.mask, args.softcap
    batch, heads, s_q, d = q.shape
    s_k, d_v = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    left, right = mask.clamped_band(s_q, s_k)
    q_pe, k_pe, dq_pe, dk_pe = pe or _NO_ROPE
    d_pe = 0 if k_pe is None else k_pe.shape[3]
    bounded = (left >= 0, right >= 0, mask.program, softcap > 0.0)
    numbers = (left, right, args.scale, softcap)
    use_descriptors = config.descriptors and tiling.has_descriptors(q)
    terms = bool(mask.program) or softcap > 0.0 or args.slopes is not None or dropout is not None
    scattered = not config.descriptors
    widest = max(d + d_pe, d_v)

    # dk and dv
    copied = use_descriptors and all(tiling.describable(t) for t in (q, do, q_pe) if t is not None)
    parts = (*tiling.streamed_parts(d, q, copied), *tiling.streamed_parts(d_v, do, copied))
    row = sum(parts) + tiling.part(d_pe)
    most = (64, 32) if dropout is None else (32, 32)  # only sm_90 has registers for more keys
    tile = tiling.fitted(config.keys, q, row, row, widest, most, "block_m", terms, scattered)
    table = tiling.table(mask, q, k, tile, "key")
    values: tuple[Any, ...] = (
        dk, dv, do, row_delta, q, k, v, args.lse, args.slopes, mask.mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, *numbers, tiling.heads_together(q, do, 1),
        *tiling.steps(False, dk, dv), *tiling.steps(copied, do, q), *tiling.steps(False, k, v), *table.strides,
        dk_pe, q_pe, k_pe, *tiling.steps(copied, q_pe), *tiling.steps(False, k_pe), *tiling.dropped(dropout),
    )  # fmt: skip
    widths = (d, d_v, *parts, d_pe, tiling.part(d_pe))
    constants: tuple[Any, ...] = (*widths, *bounded, copied, tile.block_m, tile.block_n)
    tiling.launch(_keys.over(s_q), (batch * k.shape[1] * -(-s_k // tile.block_n),), values, constants, tile)

    # dq
    copied = use_descriptors and all(tiling.describable(t) for t in (k, v, k_pe) if t is not None)
    parts = (*tiling.streamed_parts(d, k, copied), *tiling.streamed_parts(d_v, v, copied))
    row = sum(parts) + tiling.part(d_pe)
    tile = tiling.fitted(config.queries, q, row, row, widest, (64, 64), terms=terms, scattered=scattered)
    table = tiling.table(mask, q, k, tile, "query")
    values = (
        dq, means, do, row_delta, q, k, v, args.lse, args.slopes, mask.mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, *numbers, tiling.heads_together(k, v, group),
        *tiling.steps(False, dq, do, q), *tiling.steps(copied, k, v), *table.strides,
        dq_pe, q_pe, k_pe, *tiling.steps(False, dq_pe, q_pe), *tiling.steps(copied, k_pe),
        *tiling.dropped(dropout),
    )  # fmt: skip
    ragged = not mask.program and s_k % tile.block_n != 0
    widths = (d, d_v, *parts, d_pe, tiling.part(d_pe))
    constants = (*widths, *bounded, ragged, copied, tile.block_m, tile.block_n)
    tiling.launch(_queries.over(s_k), (batch * heads * -(-s_q // tile.block_m),), values, constants, tile)


def why_not(args: FmhaBackwardArgs) -> str | None:
    return why_not_operands(args.q, args.k, args.v)


@register_kernel(
    fmha.BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
@register_kernel(
    fmha_varlen.BACKWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config) -> None:
    with_delta(outs, args, config)


def with_delta(
    outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config, dropout: Dropout | None = None
) -> None:
    """Write all gradients, with delta and that of the sinks before and after `backward`."""
    lse, sinks = args.lse, args.sinks
    row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
    # Of sums over all queries, which may cancel: delta holds the rounding of o
    means = None if sinks is None else scratch(tuple(lse.shape), torch.float32, lse.device)
    delta(row_delta, args.do, args.o, args.dlse)
    backward(outs, args, row_delta, config, means=means, dropout=dropout)
    if sinks is not None:
        sink_gradient(outs[3], means, lse, sinks, args.dlse)
