"""GEMM of e4m3 operands with scales in CUDA C++ for Hopper: every 128 of K is promoted to float32.

A tile of 192x128 takes 192 * 128 * 128 * 2 flops for each 40 KB that its SM loads, and promotes 192 * 128 results with
one FMA each, on the CUDA cores, while the tensor cores go on.  So 4096x7168x16384 cannot beat 0.49 ms at 1979 TFLOP/s.
`fp8_cost_model.py` chooses the tile; fp8.cuh describes how promotion is hidden.

Operands are contiguous along K: WGMMA reads 8-bit elements no other way.  Few rows go to `few_rows_cuda.py`.
"""

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright import settings
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.log import log_once
from tilewright.ops.gemm.kernels.sm90 import fp8_cost_model
from tilewright.ops.gemm.kernels.sm90 import operands as sm90_operands
from tilewright.ops.gemm.kernels.sm90.cost_model import strip_bytes
from tilewright.ops.gemm.kernels.sm90.dense import NO_GROUPS, ROWS, Groups
from tilewright.ops.gemm.kernels.sm90.fp8_cost_model import Problem, Tile
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, aligned, columns_out, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of

_SPAN = 128  # bytes and elements of K in a stage
_SHARED = 232448 - 1024  # bytes a block may have, without its barriers
_BOX = 64 * _SPAN  # bytes of a box of 64 rows of D
_MAX_BUFFERS = 4  # boxes that a warpgroup stages
_MAX_STAGES = 8
_MAX_BOX_ROWS = 256  # of one TMA box
_BLOCKS = 3  # 128-column blocks that a tile may touch
_SCALE_PAD = 4  # rows of scales before a tile: TMA boxes begin at multiples of 16 bytes
_FP8 = torch.float8_e4m3fn
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


class Config(NamedTuple):
    """block_m x block_n of D for a block; stages of the ring; band: rows of tiles in a group of the tile order."""

    block_m: int
    block_n: int
    stages: int
    band: int


class Params(NamedTuple):
    """The compile-time constants of sm90_fp8_gemm."""

    kBlockM: int
    kBlockN: int
    kStages: int
    kScaling: int
    kWalk: int
    kActivation: int
    kBias: bool
    kAddend: int
    kInto: bool
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


KERNEL = CudaKernel(
    Path(__file__).with_name("fp8.cuh"),
    "sm90_fp8_gemm",
    "TTTTTPqPqqPPfqqPqqPP?iiiii",
    archs=("sm_90a",),
    dependent=True,
)


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why this engine cannot run these arguments; None if it can."""
    if a.dtype != _FP8 or b.dtype != _FP8:
        return f"multiplies float8_e4m3fn operands, got {a.dtype} and {b.dtype}"
    if scaling_of(a, b, scale_a, scale_b) is Scaling.OTHER:
        return "takes scales of the pairs that Scaling names"
    if major_a(a) is not Major.K or major_b(b) is not Major.K:
        return "needs a and b contiguous along K: the tensor cores read 8-bit operands no other way"
    if any(dtype not in _OUTPUTS for dtype in (out_dtype, *(t.dtype for t in (bias, c) if t is not None))):
        return "takes a bias, an addend and a result of bf16, fp16 or fp32"
    if not aligned(a, b, columns_out(b.shape[-1], activation), out_dtype):
        return "needs addresses, strides and rows of the result that are multiples of 16 bytes"
    return None


def why_not_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    alpha: float,
    activation: str,
) -> str | None:
    """Why `gemm_fp8` cannot run these arguments; None if it can."""
    if columns_out(b.shape[-1], activation) % 16:
        return f"writes rows of multiples of 16 columns, got {columns_out(b.shape[-1], activation)}"
    return why_not(a, b, scale_a, scale_b, bias, None, alpha, activation, torch.bfloat16)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
    groups: Groups = NO_GROUPS,
) -> None:
    """d = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c.

    d (B, M, N_out), a (B, M, K), b (B, K, N), scale_a (B, M blocks, K blocks), scale_b (B, N blocks, K blocks).
    """
    accumulate = c is not None and sm90_operands.adds_in_place(c, d)
    if c is not None and collecting() is not None and not accumulate and c.dtype == d.dtype == torch.float32:
        # Fake tensors have no address, so c may be d or not: compile both variants
        gemm(d, a, b, scale_a, scale_b, bias, d, alpha, activation, config, groups)
    direct = (d, d.stride(1), d.stride(0)) if groups.walk == ROWS else (0, 0, 0)
    _launch(
        d,
        direct,
        a,
        b,
        scale_a,
        scale_b,
        bias,
        None if accumulate else c,
        alpha,
        activation,
        config,
        groups,
        accumulate=accumulate,
    )


def gemm_fp8(
    q: Tensor,
    scales: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """q, scales = act(alpha * (a * scale_a) @ (b * scale_b) + bias) with q (B, M, N_out) e4m3 and scales
    (B, M, ceil(N_out / 128)), consecutive rows adjacent in memory.
    """
    direct = (scales, scales.stride(2), scales.stride(0))
    _launch(q, direct, a, b, scale_a, scale_b, bias, None, alpha, activation, config, NO_GROUPS)


def _launch(
    d: Tensor,
    direct: tuple[Tensor | int, int, int],
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
    groups: Groups,
    *,
    accumulate: bool = False,
) -> None:
    """direct: what the kernel stores without a tensor map, and its strides.  accumulate: add to d."""
    m, k = a.shape[1:]
    n = b.shape[-1]
    batches = groups.count or a.shape[0]
    scaling = scaling_of(a, b, scale_a, scale_b)
    strip = _SPAN if d.dtype == _FP8 else strip_bytes(columns_out(config.block_n, activation) * d.itemsize)
    operands = (
        tensor_map(a, (1, config.block_m, _SPAN), swizzle=_SPAN),
        tensor_map(b.mT, (1, config.block_n, _SPAN), swizzle=_SPAN),
    )
    by_token = scaling in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN), scaling == Scaling.TOKEN_TOKEN
    rows = _rows_per_copy(config.block_m) + (_SCALE_PAD if groups.walk == ROWS else 0)
    maps = (
        *operands,
        tensor_map(d, (1, 64, strip // d.itemsize), swizzle=strip),
        tensor_map(scale_a.mT, (1, 1, rows)) if by_token[0] else operands[0],  # otherwise not read
        tensor_map(scale_b.mT, (1, 1, config.block_n)) if by_token[1] else operands[1],
    )
    params = Params(
        kBlockM=config.block_m,
        kBlockN=config.block_n,
        kStages=config.stages,
        kScaling=int(scaling),
        kWalk=groups.walk,
        kActivation=ACTIVATIONS.index(activation),
        kBias=bias is not None,
        kAddend=0 if addend is None else 2 if sm90_operands.in_pairs(addend) else 1,
        kInto=accumulate,
        Element=a.dtype,
        Out=d.dtype,
        Bias=torch.float32 if bias is None else bias.dtype,
        Addend=torch.float32 if addend is None else addend.dtype,
    )
    args = (
        *maps,
        *(scale_a, scale_a.stride(0)),
        *(scale_b, scale_b.stride(1), scale_b.stride(0)),
        0 if bias is None else bias,
        0 if addend is None else addend,
        alpha,
        *((0, 0) if addend is None else (addend.stride(1), addend.stride(0))),
        *direct,
        *(groups.starts, groups.ends, groups.batched),
        *(m, n, k, batches, config.band),
    )
    sms = usable_sms(d.device)
    tiles = -(-m // config.block_m) * -(-n // config.block_n) * batches
    blocks = max(1, sms if groups.walk == ROWS else min(tiles, sms))  # the host does not know group sizes
    KERNEL(
        (blocks,),
        args,
        params,
        block=128 * (1 + _math_warpgroups(config.block_m)),
        shared_bytes=_shared_bytes(config, scaling),
    )


# ------------------------------------------------------------------------------------------------------- what to choose


def _tiles(widths: dict[int, tuple[int, ...]]) -> tuple[Tile, ...]:
    return tuple(Tile(m, n) for m, columns in widths.items() for n in columns)


TILES = _tiles({64: (32, 64, 96, 128), 128: (64, 96, 128, 192), 192: (96, 128), 256: (128,)})
"""All tiles to choose from.  No shape was fastest with columns of 112, 144, 160, 176 or 256, or with a cluster."""

TILES_FP8 = _tiles({64: (128, 256), 128: (128, 256), 256: (128,)})
"""All tiles for e4m3 results, whose columns are whole blocks of scales: 256 columns of op(B) if gated."""


def configure(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> Config:
    """Returns the tile of the least predicted time for M, N, K, layout, aligned, out_bits, epilogue, scaling."""
    sms = device_info("cuda").sm_count or 132
    config = _configure(tuple(bucket), batch, sms)
    if settings.current().print_configs:
        tile = Tile(config.block_m, config.block_n)
        prediction = fp8_cost_model.predict(_problem(bucket, batch, sms), tile)
        log_once(
            ("fp8", bucket, batch), f"fp8 GEMM {tuple(bucket)} on {sms} SMs: {config}, {prediction}", logging.WARNING
        )
    return config


@cache
def _configure(bucket: tuple[int, ...], batch: int, sms: int) -> Config:
    problem = _problem(bucket, batch, sms)
    return _config(fp8_cost_model.rank(problem, _legal(problem))[0][0], problem)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> tuple[Config, ...]:
    """Returns the six tiles of the least predicted time, each with several bands."""
    problem = _problem(bucket, batch, device_info("cuda").sm_count or 132)
    configs = []
    for tile, _ in fp8_cost_model.rank(problem, _legal(problem))[:6]:
        config = _config(tile, problem)
        configs += [config, *(config._replace(band=band) for band in (4, 8, 16) if band != config.band)]
    return tuple(configs)


def _problem(bucket: tuple[int, ...], batch: int, sms: int) -> Problem:
    m, n, k, _, _, out_bits, epilogue, scaling = bucket
    return Problem(m, n, k, out_bytes=out_bits // 8, gated=epilogue == 1, scaling=scaling, batch=batch, sms=sms)


def _legal(problem: Problem) -> tuple[Tile, ...]:
    """Returns the tiles that fit: gated ones write whole strips of 32 bytes, or a block of scales.  With two waves of
    rows there are no registers for row scales in the epilogue.
    """
    quantised = problem.out_bytes == 1
    return tuple(
        tile
        for tile in (TILES_FP8 if quantised else TILES)
        if not problem.gated or tile.block_n % (256 if quantised else 32) == 0
        if problem.scaling != Scaling.ROW or _waves(tile.block_m) == 1
    )


def _config(tile: Tile, problem: Problem) -> Config:
    config = Config(tile.block_m, tile.block_n, 0, 0)
    fixed = _shared_bytes(config, problem.scaling)
    stages = (_SHARED - fixed) // (_shared_bytes(config._replace(stages=1), problem.scaling) - fixed)
    return config._replace(stages=min(_MAX_STAGES, stages), band=fp8_cost_model.band(tile, problem.sms))


def _waves(block_m: int) -> int:
    """Returns how many times 64 rows a warpgroup multiplies."""
    return 2 if block_m > 192 else 1


def _math_warpgroups(block_m: int) -> int:
    """Returns the number of math warpgroups."""
    return block_m // 64 // _waves(block_m)


def _shared_bytes(config: Config, scaling: int) -> int:
    """Returns bytes of the stages of A, B and scales, and of staging D: a bf16 tile, at most four boxes a warpgroup."""
    stage = (config.block_m + config.block_n) * _SPAN + _scale_bytes(config, scaling)
    boxes = min(_MAX_BUFFERS, _waves(config.block_m) * -(-config.block_n // 64))
    return config.stages * stage + _math_warpgroups(config.block_m) * boxes * _BOX


def _rows_per_copy(block_m: int) -> int:
    """Returns the rows whose scales one TMA box loads, without those before the tile."""
    return block_m // (2 if block_m + _SCALE_PAD > _MAX_BOX_ROWS else 1)


def _scale_bytes(config: Config, scaling: int) -> int:
    """Returns bytes of scales in a stage: of rows in one or two boxes, and of columns or blocks of columns."""
    if scaling not in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN):
        return 0
    rows = _rows_per_copy(config.block_m)
    columns = config.block_n if scaling == Scaling.TOKEN_TOKEN else _BLOCKS
    return config.block_m // rows * _scale_row_bytes(rows + _SCALE_PAD) + _scale_row_bytes(columns)


def _scale_row_bytes(floats: int) -> int:
    """Returns bytes rounded up to 128, where TMA boxes may begin."""
    return -(-4 * floats // 128) * 128


def _configs(out_bytes: int) -> tuple[Config, ...]:
    problems = [Problem(1, 1, 1, out_bytes, scaling=scaling, sms=132) for scaling in range(4)]
    return tuple(dict.fromkeys(_config(tile, problem) for problem in problems for tile in _legal(problem)))


CONFIGS: tuple[Config, ...] = _configs(2)
"""Every config that `configure` can return on a GPU of 132 multiprocessors."""

CONFIGS_FP8: tuple[Config, ...] = _configs(1)
"""Every config of `gemm_fp8` on a GPU of 132 multiprocessors."""
