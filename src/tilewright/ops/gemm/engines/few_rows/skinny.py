"""Up to 16 rows of A against weights that lie along K, in tiles of 16 weight rows: CUDA C++ for Hopper.

Traffic: N * K elements of weights, read once.  The kernel of `few_rows_cuda` streams tiles of 64 weight rows through a
ring; few of those (33 of 2112 rows) need K split over clusters, which leaves multiprocessors idle.  Here 2112 rows are
132 tiles, and every thread has a ring of its own, which nobody waits for.  16-bit operands, and e4m3 with scales.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.engines.few_rows.launch import stores_vectors
from tilewright.ops.gemm.engines.sm90_operands import refusal as refusal_of_operands
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b
from tilewright.ops.gemm.scaling import Scaling, scaling_of

MAX_ROWS = 16
UNSCALED = -1  # beside the values of Scaling: 16-bit operands
_TILE, _LANES, _PIECE = 16, 32, 16  # weight rows of a tile, lanes of a warp, bytes that a lane copies at once
_PROCESSORS, _SHARED = 132, 228 << 10  # of an H200, and the bytes that the blocks of one share, 1 KB each the system's
_ON_THE_WAY = 48 << 10  # bytes of weights that a multiprocessor waits for, at least
_SCALES = {Scaling.TOKEN_BLOCK: 1, Scaling.TOKEN_TOKEN: 2}  # of the weights that a lane needs of 128 of K


class Config(NamedTuple):
    """tokens: rows of A in a tile, 8 or 16.  warps: of a block, which share K.  stages: in the ring of a warp, 64 bytes
    of K each, or 128 of e4m3.  split: blocks of a cluster, which share K too.  ctas: blocks that fit a multiprocessor.
    """

    tokens: int
    warps: int
    stages: int
    split: int
    ctas: int


class Params(NamedTuple):
    """What skinny_gemm is compiled for."""

    kTokens: int
    kWarps: int
    kStages: int
    kSplit: int
    kCtas: int
    kActivation: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


class ScaledParams(NamedTuple):
    """What skinny_scaled_gemm is compiled for."""

    kTokens: int
    kWarps: int
    kStages: int
    kSplit: int
    kCtas: int
    kActivation: int
    kScaling: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


FILE = Path(__file__).with_name("sm90_skinny_gemm.cuh")
KERNEL = CudaKernel(FILE, "skinny_gemm", "PPPPPPqqqqqqqqfiii?", archs=("sm_90a",), dependent=True)
SCALED = CudaKernel(FILE, "skinny_scaled_gemm", "PPPPPPPqqqqqqqqqqqqqfiii?", archs=("sm_90a",), dependent=True)


def refusal(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why this engine cannot run these arguments; None if it can."""
    if a.shape[-2] > MAX_ROWS:
        return f"is for at most {MAX_ROWS} rows of a, got {a.shape[-2]}"
    if major_a(a) is not Major.K or major_b(b) is not Major.K:
        return "needs both operands contiguous along K"
    return refusal_of_operands(a, b, bias, c, activation, out_dtype)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d = act(alpha * scale * a @ b + bias) + c.  See `engines/__init__.py`; any number of rows is computed right."""
    dtypes = a.dtype, d.dtype, a.dtype if bias is None else bias.dtype, d.dtype if c is None else c.dtype
    params = Params(*config, ACTIVATIONS.index(activation), *dtypes)
    args = (*_tensors(d, a, b, bias, c), 0 if scale is None else scale, *_strides(a, b))
    _launch(KERNEL, config, UNSCALED, (*args, *_result(d, a, b, c, alpha)), params, a, b)


def scaled(
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
) -> None:
    """d = act(alpha * (scale_a * a) @ (scale_b * b) + bias) + c; operands as in `few_rows/scaled.py`."""
    scaling = scaling_of(a, b, scale_a, scale_b)
    dtypes = a.dtype, d.dtype, d.dtype if bias is None else bias.dtype, d.dtype if c is None else c.dtype
    params = ScaledParams(*config, ACTIVATIONS.index(activation), int(scaling), *dtypes)
    scales = (scale_a.stride(0), scale_a.stride(2), *scale_b.stride())
    args = (*_tensors(d, a, b, bias, c), scale_a, scale_b, *_strides(a, b), *scales)
    _launch(SCALED, config, int(scaling), (*args, *_result(d, a, b, c, alpha)), params, a, b)


def _tensors(d: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None) -> tuple[Tensor | int, ...]:
    return b, a, d, 0 if bias is None else bias, 0 if c is None else c


def _strides(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return b.stride(0), b.stride(2), *a.stride()[:2]


def _result(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float) -> tuple[int | float | bool, ...]:
    """Strides, the factor, sizes, and whether neighbours are stored at once."""
    of_c = (0, 0) if c is None else c.stride()[:2]
    return *d.stride()[:2], *of_c, float(alpha), a.shape[1], b.shape[2], a.shape[2], stores_vectors(d)


def _launch(
    kernel: CudaKernel, config: Config, scaling: int, args: tuple[object, ...], params: object, a: Tensor, b: Tensor
) -> None:
    """A block, or a cluster, for each tile of each product.  Raises InputError where a block fits none."""
    needed = shared_bytes(config, scaling)
    if needed > _SHARED:
        raise InputError(
            f"skinny: {config} needs {needed} bytes of shared memory, rings, sums and the system's, of the {_SHARED} "
            "of a multiprocessor; take fewer stages or warps, as `candidates` does"
        )
    tiles = a.shape[0] * -(-a.shape[1] // config.tokens) * -(-b.shape[2] // _TILE)
    kernel(
        (tiles * config.split,),
        args,
        params,
        block=_LANES * config.warps,
        shared_bytes=ring_bytes(config, scaling),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )


def ring_bytes(config: Config, scaling: int = UNSCALED) -> int:
    """Dynamic shared memory of a block: of every lane 16 bytes of two weight rows and of each token, once a stage or
    twice (e4m3), and its scales.
    """
    groups = config.tokens // 8
    pieces = (2 + groups) * (1 if scaling == UNSCALED else 2)
    scales = 2 * groups + _SCALES[Scaling(scaling)] if scaling in _SCALES else 0
    return config.warps * config.stages * _LANES * (_PIECE * pieces + 4 * scales)


def shared_bytes(config: Config, scaling: int = UNSCALED) -> int:
    """Of a block: the rings, the sums of all warps and of all blocks of its cluster, and 1 KB of the system's."""
    sums = _TILE * config.tokens * 4
    return ring_bytes(config, scaling) + config.warps * sums + config.split * sums * 5 // 4 + 1024


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> Iterator[Config]:
    """8 to 32 warps a multiprocessor, with rings as deep as fit; K split where there are fewer tiles than those.

    bucket: M, N, K, layout, aligned, out_bits, epilogue; and scaling, if there are scales
    """
    rows, columns, depth = bucket[:3]
    scaling = bucket[7] if len(bucket) > 7 else UNSCALED
    tokens, stage = (8 if rows <= 8 else 16), (64 if scaling == UNSCALED else 128)  # bytes of K
    splits = (1,) if columns >= _PROCESSORS * _TILE else (1, 2, 4)
    # 16 tokens of e4m3 leave room for the rings of eight warps
    totals = (16, 32) if tokens == 8 or scaling == UNSCALED else (8, 16)
    for split, warps, ctas in product(splits, (4, 8, 16), (1, 2, 4)):
        rings = (Config(tokens, warps, stages, split, ctas) for stages in (8, 6, 5, 4, 3))
        deepest = next((ring for ring in rings if ctas * shared_bytes(ring, scaling) <= _SHARED), None)
        if deepest is None or warps * ctas not in totals or depth * dtype.itemsize < stage * warps * split:
            continue
        if ctas * warps * (deepest.stages - 1) * _TILE * stage >= _ON_THE_WAY:
            yield deepest


CONFIGS: tuple[Config, ...] = ()
"""`configure` never picks this engine: where it is faster than `few_rows_cuda`, a table says so."""
