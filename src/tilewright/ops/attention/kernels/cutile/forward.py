"""Attention forward in cuTile, of `fmha`: the choice of tiles and the launch.  The kernel is in
`forward_kernel.py`.

4*B*H*S_q*S_k*D flops without a mask: (2, 16, 8192, 128) cannot beat 1.11 ms at 989 TFLOP/s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.cutile_launch import Hints
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.bucket import (
    CAUSAL,
    SLOPES,
    FmhaBucket,
    forward_bucket,
    why_not_addressable,
    why_not_band,
)
from tilewright.ops.attention.fmha import FORWARD
from tilewright.ops.attention.kernels.cutile.forward_kernel import forward_kernel
from tilewright.ops.attention.kernels.cutile.tiles import LOG2E

MOST_D = 256
L2_BYTES = 24 << 20  # K and V that other tiles read again before they leave the L2


class Config(NamedTuple):
    """Tile sizes, warps and occupancy."""

    block_m: int
    block_n: int
    num_warps: int  # consumer warps, 4 or 8; 4 more load
    occupancy: int  # blocks per SM
    ahead: bool  # issue the next S = Q K^T before the softmax of this one


def padded(width: int) -> int:
    """Columns of the tile that holds `width` columns; the rest is 0."""
    return max(16, 1 << (width - 1).bit_length())


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """The first candidate."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that compile without spills for sm_90."""
    widest = max(padded(bucket.D), padded(bucket.D_v))
    # ALiBi keeps positions and keys of every score in registers; two tiles of scores do not fit
    ahead = not bucket.extras & SLOPES
    if widest <= 64:
        configs = [Config(64, 128, 4, 2, True), Config(128, 128, 8, 1, True), Config(64, 128, 4, 2, False)]
    elif widest <= 128:
        configs = [Config(64, 128, 4, 2, True), Config(128, 64, 8, 1, True), Config(64, 128, 4, 2, False)]
    else:
        configs = [Config(128, 64, 8, 1, True), Config(64, 64, 4, 1, True), Config(64, 128, 4, 1, False)]
    return tuple(dict.fromkeys(c if ahead else c._replace(ahead=False) for c in configs))


def _every_config() -> tuple[Config, ...]:
    """Every config that `configure` returns."""
    buckets = [FmhaBucket(32, 1, 8192, 8192, d, d, CAUSAL, extras, 1) for d in (64, 128, 256) for extras in (0, SLOPES)]
    return tuple(dict.fromkeys(configure(bucket, torch.bfloat16) for bucket in buckets))


CONFIGS = _every_config()


def why_not_operands(bucket: FmhaBucket, q: Tensor, v: Tensor) -> str | None:
    """Why the kernels of both directions cannot run over these operands, or None if they can."""
    reason = why_not_band(bucket) or why_not_addressable(bucket)
    if reason is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    d, d_v = q.shape[3], v.shape[3]
    if max(d, d_v) > MOST_D or not d:
        return f"has head dimensions from 1 to {MOST_D}, got D={d}, D_v={d_v}"
    return None


def why_not(args: FmhaArgs) -> str | None:
    return why_not_operands(forward_bucket(args), args.q, args.v)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaArgs, config: Config) -> None:
    (o, lse), q, k, v, sinks, slopes = outs, args.q, args.k, args.v, args.sinks, args.slopes
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    left, right = args.mask.clamped_band(s_q, s_k)
    softcapped, sloped = args.softcap > 0, slopes is not None
    forward_kernel(
        (-(-s_q // config.block_m) * heads * batch,),
        (
            *(o, lse, q, k, v),
            lse if sinks is None else sinks,  # a placeholder that is not read
            lse if slopes is None else slopes,
            args.scale * LOG2E,
            args.softcap * LOG2E,
            left,
            right,
            heads_together(heads * batch, heads // k.shape[1], s_k * (d + d_v) * q.element_size()),
        ),
        (
            *(padded(d), padded(d_v), config.block_m, config.block_n),
            *(left >= 0, right >= 0, s_k % config.block_n != 0),
            *(softcapped or sloped or args.scale <= 0, softcapped, sloped, sinks is not None, config.ahead),
        ),
        Hints(config.num_warps, config.occupancy),
    )


def heads_together(heads: int, group: int, kv_bytes: int) -> int:
    """Query heads that run together: their K and V fit the L2; `group` heads share a kv head of `kv_bytes`."""
    return min(heads, max(1, L2_BYTES // kv_bytes) * group)
