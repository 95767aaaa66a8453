"""Up to 16 rows of A against weights that lie along K, without shared memory in between: CUDA C++ for Hopper.

Traffic: N * K elements of weights, read once.  The kernel of `few_rows_cuda` streams tiles of 64 weight rows through a
ring; few of those (33 of 2112 rows) need K split over clusters, which leaves multiprocessors idle.  Here a tile is 16
rows, and each warp keeps a few KB on their way.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.engines.few_rows.launch import stores_vectors
from tilewright.ops.gemm.engines.sm90_operands import refusal as refusal_of_operands
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b

MAX_ROWS = 16
_TILE, _CHUNK = 16, 32  # weight rows of a tile, K of a chunk
_PROCESSORS, _SHARED = 132, 228 << 10  # of an H200, and the bytes that the blocks of one share


class Config(NamedTuple):
    """tokens: rows of A in a tile, 8 or 16.  warps: of a block, which share K.  stages: chunks of 32 of K in the
    ring of a warp.  split: blocks of a cluster, which share K too.  ctas: blocks that fit a multiprocessor.
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


KERNEL = CudaKernel(
    Path(__file__).with_name("sm90_skinny_gemm.cuh"),
    "skinny_gemm",
    "PPPPPPqqqqqqqqfiii?",
    archs=("sm_90a",),
    dependent=True,
)


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
    batches, rows, depth = a.shape
    columns = b.shape[-1]
    params = Params(
        *config,
        kActivation=ACTIVATIONS.index(activation),
        Element=a.dtype,
        Out=d.dtype,
        Bias=a.dtype if bias is None else bias.dtype,
        Addend=d.dtype if c is None else c.dtype,
    )
    args = (
        b,
        a,
        d,
        0 if bias is None else bias,
        0 if c is None else c,
        0 if scale is None else scale,
        b.stride(0),
        b.stride(2),
        *a.stride()[:2],
        *d.stride()[:2],
        *((0, 0) if c is None else c.stride()[:2]),
        float(alpha),
        rows,
        columns,
        depth,
        stores_vectors(d),
    )
    tiles = batches * -(-rows // config.tokens) * -(-columns // _TILE)
    KERNEL(
        (tiles * config.split,),
        args,
        params,
        block=32 * config.warps,
        shared_bytes=ring_bytes(config),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )


def ring_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: of every lane 16 bytes of two weight rows and of each token, a stage."""
    return config.warps * config.stages * (2 + config.tokens // 8) * 32 * 16


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> Iterator[Config]:
    """16 or 32 warps a multiprocessor, with rings as deep as fit; K split where there are fewer tiles than those."""
    rows, columns, depth = bucket[:3]
    tokens = 8 if rows <= 8 else 16
    splits = (1,) if columns >= _PROCESSORS * _TILE else (1, 2, 4)
    for split, warps, ctas in product(splits, (4, 8, 16), (1, 2, 4)):
        rings = (Config(tokens, warps, stages, split, ctas) for stages in (8, 4))
        deepest = next((ring for ring in rings if ctas * shared_bytes(ring) <= _SHARED), None)
        if deepest is not None and warps * ctas in (16, 32) and depth >= _CHUNK * warps * split:
            yield deepest


def shared_bytes(config: Config) -> int:
    """Of a block: the rings, the sums of all warps and of all blocks of its cluster, and 1 KB of the system's."""
    sums = _TILE * config.tokens * 4
    return ring_bytes(config) + config.warps * sums + config.split * sums * 5 // 4 + 1024


CONFIGS: tuple[Config, ...] = ()
"""`configure` never picks this engine: where it is faster than `few_rows_cuda`, a table says so."""
