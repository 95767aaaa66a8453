"""Attention forward in Triton, of `fmha` and `fmha_varlen`: for any strides, head dimensions, masks and lengths.
`mla.py` launches it with a second pair of score operands.

One program per query tile; scores stay in registers.  K and V come through tensor descriptors if the operands are
aligned and the GPU has TMA (sm_90 and later), else through pointers.

4 * B * H * pairs * D flops, with `pairs` the (query, key) that the mask allows: (2, 16, 8192, 128) without a mask
cannot beat 1.11 ms at 989 TFLOP/s.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention import fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.bucket import CAUSAL, PROGRAM, SOFTCAP, FmhaBucket
from tilewright.ops.attention.dropped import Dropout
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.forward_kernel import forward_kernel
from tilewright.ops.attention.kernels.triton.tiles import MOST_D, Config

_kernel = tiling.Looping(forward_kernel, "S_k")
_SUMS = 192  # registers per thread, of 255, for acc and scores
_SCORES = 32  # of them for scores under a mask program; twice as many spill


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """64 queries and 64 keys in four warps: of the programs on an SM some multiply while others compute a softmax.

    Measured on an H200 at D = 128 only: 128 queries in four warps are 3 to 4 % slower where sequences are short, 2 to
    5 % faster at 16384 tokens and without a mask, and spill.  Heads of more than 128 have room for fewer stages.
    """
    d, d_v = bucket.D, bucket.D_v
    widest = max(d, d_v)
    if dtype.itemsize == 4:  # FMA instead of tensor cores on NVIDIA: small tiles
        return Config(32, 16 if tiling.has_terms(bucket.mask, bucket.extras) else 32, 8, 2, False)
    if not bucket.aligned:
        return Config(64, 64, 4, 2, False) if widest <= 128 else Config(64, 32, 8, 2, False)
    if widest <= 128:
        return Config(64, 64, 4, 3, True)
    if d + d_v <= 320 and d_v <= 128:
        return Config(64, 64, 4, 2, True)
    return Config(128, 64, 8, 2, True)


CONFIGS = tuple(
    dict.fromkeys(
        configure(FmhaBucket(32, 1, 8192, 8192, d, d_v, CAUSAL, extras, aligned), dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for extras in (0, SOFTCAP)
        for d, d_v, aligned in ((64, 64, 0), (256, 256, 0), (128, 128, 1), (192, 128, 1), (256, 256, 1))
    )
)


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles whose stages fit an H200, and whose acc and scores leave registers for the softmax."""
    resident, columns = sum(tiling.parts(bucket.D)), sum(tiling.parts(bucket.D_v))
    if dtype.itemsize == 4:
        return tuple(Config(32, n, 8, 2, False) for n in (16, 32))
    return tuple(
        Config(m, n, warps, stages, bool(bucket.aligned))
        for m, warps in ((64, 4), (128, 8), (128, 4))
        for n in (32, 64, 128)
        for stages in (2, 3)
        if dtype.itemsize * (m * resident + stages * n * (resident + columns)) < tiling.SHARED_BYTES["sm_90"]
        and m * (n + columns) <= 32 * warps * _SUMS
        and (bucket.mask != PROGRAM or m * n <= 32 * warps * _SCORES)
    )


def why_not_operands(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this kernel cannot run over these operands, or None if it can."""
    if max(q.shape[3], v.shape[3]) > MOST_D:
        return f"holds heads of up to {MOST_D} numbers"
    return "has no keys to read" if k.shape[2] == 0 else None


def forward(
    outs: tuple[Tensor, Tensor],
    args: FmhaArgs,
    config: Config,
    pe: tuple[Tensor, Tensor] | None = None,
    dropout: Dropout | None = None,
) -> None:
    """Write o (B, H, S_q, D_v) and lse (B, H, S_q) float32; S_k >= 1.

    pe: q_pe (B, H, S_q, D_pe) and k_pe (B, 1, S_k, D_pe); then s = scale * (q k^T + q_pe k_pe^T).
    """
    (o, lse), q, k, v, mask, softcap = outs, args.q, args.k, args.v, args.mask, args.softcap
    batch, heads, s_q, d = q.shape
    s_k, d_v = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    left, right = mask.clamped_band(s_q, s_k)
    q_pe, k_pe = pe or (None, None)
    d_pe = 0 if k_pe is None else k_pe.shape[3]
    copied = (k, v) if k_pe is None else (k, v, k_pe)
    descriptors = config.descriptors and all(map(tiling.describable, copied)) and tiling.has_descriptors(k)
    parts = tiling.streamed_parts(d, k, descriptors)
    value_parts = tiling.streamed_parts(d_v, v, descriptors)
    resident = sum(parts) + tiling.part(d_pe)
    terms = bool(mask.program) or softcap > 0.0 or args.slopes is not None or dropout is not None
    tile = tiling.fitted(
        config.tile, q, resident, resident + sum(value_parts), max(d + d_pe, d_v), (128, 64), terms=terms,
        scattered=not config.descriptors,
    )  # fmt: skip
    table = tiling.table(mask, q, k, tile, "query")
    values = (
        o, lse, q, k, v, args.sinks, args.slopes, mask.mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, left, right, args.scale, softcap, tiling.heads_together(k, v, group),
        *tiling.steps(False, o, q), *tiling.steps(descriptors, k, v), *table.strides,
        q_pe, k_pe, *tiling.steps(False, q_pe), *tiling.steps(descriptors, k_pe), *tiling.dropped(dropout),
    )  # fmt: skip
    constants = (
        d, d_v, *parts, *value_parts, d_pe, tiling.part(d_pe),
        left >= 0, right >= 0, mask.program, softcap > 0.0,
        softcap > 0.0 or args.slopes is not None or args.scale <= 0.0,
        not mask.program and s_k % tile.block_n != 0,
        descriptors, tile.block_m, tile.block_n,
    )  # fmt: skip
    grid = (batch * heads * -(-s_q // tile.block_m),)
    tiling.launch(_kernel.over(s_k), grid, values, constants, tile)


def why_not(args: FmhaArgs) -> str | None:
    return why_not_operands(args.q, args.k, args.v)


@register_kernel(
    fmha.FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
@register_kernel(
    fmha_varlen.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaArgs, config: Config) -> None:
    forward(outs, args, config)
