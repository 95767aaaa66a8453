"""Few rows of A, at most 64, against weights that are read once: CUDA C++ for Hopper.

Traffic: N * K elements of weights.  Floor: 7.6 us for 4096 x 4096 in bf16 at 4.4 TB/s.  The tensor cores are mostly
idle; every multiprocessor must keep 64 KB or more in flight, from the first microsecond to the last.  Hence tiles of 64
weight rows, K split over the blocks of a cluster if there are too few tiles, rings that continue across tiles, and a
start that overlaps the end of the previous kernel (programmatic dependent launch: a launch in a chain costs 2.2 to 2.7
us in addition to the reading, 3.3 without it).  Rows of A ("tokens") come from the L2 again for every tile: tokens / 64
bytes for each byte of weights, so 64 tokens double the L2 traffic.

Measured on an H200, 2026-11: 4096 x 4096 at M = 8 takes 9.4 us, cuBLAS 12.6.  Over 11 shapes, tiles of 128 or 256
weight rows and stages of 64 of K gained 0.2 % (geometric mean), clusters that end after one tile nothing, so they were
removed.

This module has 16-bit operands; `few_rows/scaled.py` has those of e4m3 with scales, `few_rows/grouped.py`
groups of rows with their own weights, of both kinds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90 import operands as sm90_operands
from tilewright.ops.gemm.kernels.sm90.few_rows_grouped import CONFIGS as CONFIGS_GROUPED
from tilewright.ops.gemm.kernels.sm90.few_rows_grouped import candidates as candidates_grouped
from tilewright.ops.gemm.kernels.sm90.few_rows_grouped import configure as configure_grouped
from tilewright.ops.gemm.kernels.sm90.few_rows_grouped import gemm as grouped
from tilewright.ops.gemm.kernels.sm90.few_rows_grouped import why_not as why_not_grouped
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    along_n,
    check_split,
    launch,
    operand_maps,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS, UNSCALED, Config, Work
from tilewright.ops.gemm.kernels.sm90.few_rows_scaled import CONFIGS as CONFIGS_SCALED
from tilewright.ops.gemm.kernels.sm90.few_rows_scaled import candidates as candidates_scaled
from tilewright.ops.gemm.kernels.sm90.few_rows_scaled import configure as configure_scaled
from tilewright.ops.gemm.kernels.sm90.few_rows_scaled import gemm as scaled
from tilewright.ops.gemm.kernels.sm90.few_rows_scaled import why_not as why_not_scaled
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b

__all__ = [
    "CONFIGS",
    "CONFIGS_GROUPED",
    "CONFIGS_SCALED",
    "KERNEL",
    "MAX_ROWS",
    "Config",
    "Params",
    "candidates",
    "candidates_grouped",
    "candidates_scaled",
    "configure",
    "configure_grouped",
    "configure_scaled",
    "gemm",
    "grouped",
    "scaled",
    "why_not",
    "why_not_grouped",
    "why_not_scaled",
]


class Params(NamedTuple):
    """The compile-time constants of few_rows_gemm."""

    kTokens: int
    kStages: int
    kSplit: int
    kCtas: int
    kMnMajor: bool
    kActivation: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


KERNEL = CudaKernel(FILE, "few_rows_gemm", "TTPPPPqqqqfiiiii?", archs=("sm_90a",), dependent=True)


def why_not(
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
    if major_a(a) is not Major.K or major_b(b) is None:
        return "needs a contiguous along K, and b along K or N"
    return sm90_operands.why_not(a, b, bias, c, activation, out_dtype)


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
    """d = act(alpha * scale * a @ b + bias) + c.  See `engines/__init__.py`; correct for any number of rows."""
    batches, m, k = a.shape
    n = b.shape[-1]
    check_split(config, k, a.itemsize)
    token_rows = min(m, config.tokens)  # the box ends with the rows of a; the rest of the tile is not stored
    params = Params(
        kTokens=config.tokens,
        kStages=config.stages,
        kSplit=config.split,
        kCtas=config.ctas,
        kMnMajor=along_n(b),
        kActivation=ACTIVATIONS.index(activation),
        Element=a.dtype,
        Out=d.dtype,
        Bias=a.dtype if bias is None else bias.dtype,
        Addend=d.dtype if c is None else c.dtype,
    )
    args = (
        *operand_maps(a, b, token_rows),
        d,
        0 if bias is None else bias,
        0 if c is None else c,
        0 if scale is None else scale,
        *d.stride()[:2],
        *((0, 0) if c is None else c.stride()[:2]),
        float(alpha),
        m,
        n,
        k,
        batches,
        token_rows,
        stores_vectors(d),
    )
    tiles = batches * -(-m // config.tokens) * -(-n // model.BLOCK_N)
    launch(KERNEL, config, model.shared_bytes(config), tiles, d.device, args, params)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows."""
    work = Work(*bucket[:3])
    tokens = model.fitting(model.TOKENS, work.rows)
    return model.ranked((c for c in CONFIGS if c.tokens == tokens), work)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    work = Work(*bucket[:3])
    return tuple(model.ranked(model.space([model.fitting(model.TOKENS, work.rows)], UNSCALED), work)[:24])


CONFIGS: tuple[Config, ...] = model.defaults(UNSCALED)
"""Every config that `configure` can return."""
