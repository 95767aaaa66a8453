"""fmha_fp8 in Triton: float8 matmuls on the tensor cores, any strides, masks and lengths.

One program per query tile; scores stay in registers.  K and V come through tensor descriptors if the operands are
aligned and the GPU has TMA (sm_90 and later).  On these GPUs V may be transposed first (`transpose.py`), so that
P V reads both operands K-major.  GPUs without e4m3 (before sm_89; gfx942, which has another e4m3) decode it to float16
and multiply that.

4 * B * H * pairs * D flops, with `pairs` the (query, key) that the mask allows: (2, 16, 8192, 128) without a mask
cannot beat 0.56 ms at 1979 TFLOP/s.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import target_of
from tilewright.ops.attention.bucket import PROGRAM
from tilewright.ops.attention.fmha_fp8 import FORWARD
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args, FmhaFp8Bucket
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.fp8_kernel import forward_kernel
from tilewright.ops.attention.kernels.triton.transpose import transposed
from tilewright.ops.quant.kernels.triton.numbers import as_stored

_kernel = tiling.Looping(forward_kernel, "S_k")
_LEAST = 32  # K of one float8 MMA instruction


class Config(NamedTuple):
    """block_m queries and block_n keys per tile, both divisors of 128.   descriptors: load K and V by TMA where the GPU
    has it.   transposed: then also transpose V first.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool
    transposed: bool


def _width(d: int) -> int:
    """The power of two that covers `d`, the width of tiles."""
    return max(_LEAST, triton.next_power_of_2(d))


def configure(bucket: FmhaFp8Bucket, dtype: torch.dtype) -> Config:
    """Four warps with 64 queries: on an H200 20 to 50 % faster than eight with 128 at D = 128.  Fewer keys if rows are
    unaligned or a mask program needs the registers; more warps if heads are wide.

    V is transposed if many query tiles read it or keys are many: that takes 20 us of 766 at (2, 16, 8192, 128), causal;
    the kernel without it takes 2100.  One query of 12 heads over 2000 keys takes 26 us with it, 75 without; 251 of
    each 9.0 with it, 8.4 without.  One tile of keys is loaded sooner without a descriptor: 128 of each, D = 64, in
    5.0 us, 6.8 with.
    """
    if not bucket.aligned:
        return Config(64, 32, 8, 1, False, False)
    transpose = bucket.S_q * bucket.group > 256 or bucket.S_k > 512
    if max(bucket.D, bucket.D_v) > 128:
        return Config(64, 64, 8, 2, True, transpose)
    copies = transpose or bucket.S_k > 128 or bucket.mask == PROGRAM
    return Config(64, 64 if bucket.mask == PROGRAM else 128, 4, 3, copies, transpose)


CONFIGS = (
    Config(64, 32, 8, 1, False, False),
    Config(64, 128, 4, 3, False, False),
    *(
        Config(64, *tile, True, transpose)
        for tile in ((128, 4, 3), (64, 4, 3), (64, 8, 2))
        for transpose in (False, True)
    ),
)


def candidates(bucket: FmhaFp8Bucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles whose acc and scores leave registers for the softmax, and whose stages fit an H200."""
    resident, widest = _width(bucket.D), max(bucket.D, bucket.D_v)
    streamed = resident + _width(bucket.D_v)
    return tuple(
        Config(m, n, warps, stages, bool(bucket.aligned), transpose)
        for m in (64, 128)
        for n in (64, 128)
        for warps in (m // 16 if widest <= 128 else 8,)
        for stages in (2, 3)
        for transpose in ((True, False) if bucket.aligned else (False,))
        if m * resident + stages * n * streamed <= tiling.SHARED_BYTES["sm_90"]
        and m * (n + 2 * _width(bucket.D_v)) <= warps * 32 * 192
    )


def _fitted(config: Config, q: Tensor, resident: int, streamed: int) -> Config:
    """`config`, chosen for an H200, reduced to what the GPU of `q` can run."""
    arch, stored = target_of(q), as_stored(q).dtype
    decoded = stored == torch.uint8  # in registers, to float16
    size = 2 if decoded else 1
    if arch not in ("cpu", "sm_90"):
        config = config._replace(block_n=min(config.block_n, 32 if decoded and streamed > 256 else 64))
    if decoded or arch.startswith("gfx"):
        config = config._replace(block_m=min(config.block_m, 64))
    if arch.startswith("gfx"):
        config = config._replace(num_warps=4)
    shared = tiling.SHARED_BYTES["sm_90"] if arch == "cpu" else tiling.SHARED_BYTES.get(arch, tiling.SHARED_ELSEWHERE)
    while (
        config.num_stages > 1
        and size * (config.block_m * resident + config.num_stages * config.block_n * streamed) > shared
    ):
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def why_not(args: FmhaFp8Args) -> str | None:
    if max(args.q.shape[3], args.v.shape[3]) > tiling.MOST_D:
        return f"holds heads of up to {tiling.MOST_D} numbers"
    if target_of(args.q).startswith("gfx") and args.program:
        return "has causal masks and windows on AMD's GPUs, whose scalar registers do not hold a program's comparisons"
    return "has no keys to read" if args.k.shape[2] == 0 else None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaFp8Args, config: Config) -> None:
    (o, lse), q, k, v, mask = outs, args.q, args.k, args.v, args.mask
    q_scale, k_scale, v_scale, scale, softcap = args.q_scale, args.k_scale, args.v_scale, args.scale, args.softcap
    batch, heads, s_q, d = q.shape
    s_k, d_v = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    width, width_v = _width(d), _width(d_v)
    left, right = mask.clamped_band(s_q, s_k)
    config = _fitted(config, q, width, width + width_v)
    copies = config.descriptors and tiling.has_descriptors(k) and tiling.describable(k)
    transpose = config.transposed and copies
    descriptors = copies and (transpose or tiling.describable(v))
    table = tiling.table(mask, q, k, config, "query")
    chunk = tiling.heads_together(k, v, group)
    values = transposed(v) if transpose else v
    q, k, values = (as_stored(t) for t in (q, k, values))
    general = softcap > 0.0 or scale <= 0.0 or k_scale.shape[2] > 1
    operands = (
        o, lse, q, k, values, q_scale, k_scale, v_scale, args.sinks, mask.mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, left, right, scale, softcap, chunk,
        *tiling.steps(False, o, q), *tiling.steps(descriptors, k), *tiling.steps(descriptors and not transpose, values),
        *(step for t in (q_scale, k_scale, v_scale) for step in _scale_steps(t)), *table.strides,
    )  # fmt: skip
    constants = (
        d, d_v, width, width_v, k_scale.shape[2] > 1, v_scale.shape[2] > 1,
        left >= 0, right >= 0, mask.program, softcap > 0.0, general, not mask.program and s_k % config.block_n != 0,
        descriptors, transpose, config.block_m, config.block_n,
    )  # fmt: skip
    grid = (batch * heads * -(-s_q // config.block_m),)
    tiling.launch(_kernel.over(s_k), grid, operands, constants, config)


def _scale_steps(scales: Tensor) -> tuple[int, int, int]:
    """Strides of scales (B, H, blocks); 0 along blocks if one scale serves all tokens."""
    return scales.stride(0), scales.stride(1), scales.stride(2) if scales.shape[2] > 1 else 0
