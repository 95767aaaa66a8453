"""fmha_fp8 in Triton: float8 products on the matrix units, any strides, masks and lengths.

One program a tile of queries; the scores of a tile of keys never leave the chip.  Keys and values come through tensor
descriptors where the operands are aligned and the GPU has a copy engine (sm_90 and later).  On these GPUs values may be
turned beforehand (`triton_turn.py`), so that the product with them reads both operands along K.  GPUs without e4m3
(before sm_89; gfx942, which has another e4m3) decode it to float16 and multiply that.

4 * B * H * pairs * D flops, with `pairs` the (query, key) that the mask leaves: (2, 16, 8192, 128) without a mask
cannot beat 0.56 ms at 1979 TFLOP/s.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import target_of
from tilewright.ops.attention.band import clamped_band
from tilewright.ops.attention.engines import triton_tiles as tiling
from tilewright.ops.attention.fmha.raw import PROGRAM
from tilewright.ops.attention.fmha_fp8.raw import BUCKET, FORWARD
from tilewright.ops.attention.fmha_fp8.triton_kernel import forward_kernel
from tilewright.ops.attention.fmha_fp8.triton_turn import turned
from tilewright.ops.quant.triton_numbers import as_stored

_kernel = tiling.Looping(forward_kernel, "S_k")
_LEAST = 32  # numbers along K that the matrix units take at once


class Config(NamedTuple):
    """block_m queries and block_n keys a tile, both divisors of 128.   descriptors: copy keys and values by the copy
    engine where there is one.   turned: with it, turn the values beforehand.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool
    turned: bool


def _width(d: int) -> int:
    """The power of two that covers `d`, as kernels compute with it."""
    return max(_LEAST, triton.next_power_of_2(d))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Four warps with 64 queries, on an H200 ahead of eight with 128 by 20 to 50 % at D = 128; fewer keys where they
    come byte by byte, queries are few or a program's arithmetic needs the registers; more warps where heads are wide.

    Values are turned where more than two tiles of queries read them: that takes 20 us of 766 at (2, 16, 8192, 128),
    causal, where the kernel without takes 2100.
    """
    of = dict(zip(BUCKET, bucket, strict=True))
    if not of["aligned"]:
        return Config(64, 32, 8, 1, False, False)
    turn = of["S_q"] * of["group"] > 256
    if max(of["D"], of["D_v"]) > 128:
        return Config(64, 64, 8, 2, True, turn)
    if of["S_q"] <= 64:
        return Config(64, 64, 4, 2, True, turn)
    return Config(64, 64 if of["mask"] == PROGRAM else 128, 4, 3, True, turn)


CONFIGS = (
    Config(64, 32, 8, 1, False, False),
    *(
        Config(64, *tile, True, turn)
        for tile in ((128, 4, 3), (64, 4, 3), (64, 4, 2), (64, 8, 2))
        for turn in (False, True)
    ),
)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles whose sums and scores leave registers for the softmax, and whose stages fit an H200."""
    of = dict(zip(BUCKET, bucket, strict=True))
    kept, streamed, wide = _width(of["D"]), _width(of["D"]) + _width(of["D_v"]), max(of["D"], of["D_v"])
    return tuple(
        Config(m, n, warps, stages, bool(of["aligned"]), turn)
        for m in (64, 128)
        for n in (64, 128)
        for warps in (m // 16 if wide <= 128 else 8,)
        for stages in (2, 3)
        for turn in ((True, False) if of["aligned"] else (False,))
        if m * kept + stages * n * streamed <= tiling.SHARED_BYTES["sm_90"]
        and m * (n + 2 * _width(of["D_v"])) <= warps * 32 * 192
    )


def _fitted(config: Config, q: Tensor, kept: int, streamed: int) -> Config:
    """`config`, which an H200 was asked about, as the GPU of `q` can run it."""
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
        and size * (config.block_m * kept + config.num_stages * config.block_n * streamed) > shared
    ):
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def supports(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> str | None:
    """By what bucket, dtype and device tell."""
    if max(q.shape[3], v.shape[3]) > tiling.MOST_D:
        return f"holds heads of up to {tiling.MOST_D} numbers"
    if target_of(q).startswith("gfx") and FORWARD.bucket(q, k, v, *rest)[BUCKET.index("mask")] == PROGRAM:
        return "has causal masks and windows on AMD's GPUs, whose scalar registers do not hold a program's comparisons"
    return "has no keys to read" if k.shape[2] == 0 else None


@register_impl(
    "fmha_fp8",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=supports,
)
def launch(
    outs: tuple[Tensor, Tensor],
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
    out_dtype: torch.dtype,  # that of outs
    *,
    config: Config,
) -> None:
    """See `raw.FORWARD`; S_k >= 1."""
    o, lse = outs
    batch, heads, s_q, d = q.shape
    s_k, d_v = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    width, width_v = _width(d), _width(d_v)
    left, right = clamped_band(left, right, s_q, s_k)
    config = _fitted(config, q, width, width + width_v)
    copies = config.descriptors and tiling.has_descriptors(k) and tiling.describable(k)
    turn = config.turned and copies
    descriptors = copies and (turn or tiling.describable(v))
    table = tiling.table(program, mask_data, q, k, config, "query")
    chunk = tiling.heads_together(k, v, group)
    values = turned(v) if turn else v
    q, k, values = (as_stored(t) for t in (q, k, values))
    general = softcap > 0.0 or scale <= 0.0 or k_scale.shape[2] > 1
    args = (
        o, lse, q, k, values, q_scale, k_scale, v_scale, sinks, mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, left, right, scale, softcap, chunk,
        *tiling.steps(False, o, q), *tiling.steps(descriptors, k), *tiling.steps(descriptors and not turn, values),
        *(step for t in (q_scale, k_scale, v_scale) for step in _scale_steps(t)), *table.strides,
    )  # fmt: skip
    constants = (
        d, d_v, width, width_v, k_scale.shape[2] > 1, v_scale.shape[2] > 1,
        left >= 0, right >= 0, program, softcap > 0.0, general, not program and s_k % config.block_n != 0,
        descriptors, turn, config.block_m, config.block_n,
    )  # fmt: skip
    grid = (batch * heads * -(-s_q // config.block_m),)
    tiling.launch(_kernel.over(s_k), grid, args, constants, config)


def _scale_steps(scales: Tensor) -> tuple[int, int, int]:
    """Strides of scales (B, H, blocks); none along blocks where one serves all tokens."""
    return scales.stride(0), scales.stride(1), scales.stride(2) if scales.shape[2] > 1 else 0
