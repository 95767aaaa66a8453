"""Groups of rows, each with its own weights: experts with few tokens, at the speed of reading their weights.

Only the device knows which rows a group has.  Each warp counts the tiles of 128 groups at a time from starts and ends,
by a prefix sum over its lanes, and finds its tile: no table in memory, no extra launch, any number of groups.  A tile
is 64 rows of weights by the tokens of a group; tokens of the next group in the same box are multiplied but not stored.
Groups have more rows than expected as often as fewer, so tiles have room for half as many tokens again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90 import few_rows_scaled as scaled
from tilewright.ops.gemm.kernels.sm90 import operands as sm90_operands
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    along_n,
    check_split,
    launch,
    operand_maps,
    scale_maps,
    scale_strides,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import Config, Work
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of


class Params(NamedTuple):
    """The compile-time constants of few_rows_grouped_gemm."""

    kTokens: int
    kStages: int
    kSplit: int
    kCtas: int
    kMnMajor: bool
    kActivation: int
    kScaling: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


KERNEL = CudaKernel(FILE, "few_rows_grouped_gemm", "TTTTPPPPPqqqqqiiiii??", archs=("sm_90a",), dependent=True)


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why this engine cannot run these arguments; None if it can.  a (1 or G, R, K), b (G, K, N)"""
    if expected > model.MAX_ROWS:
        return f"is for groups of at most {model.MAX_ROWS} expected rows, got {expected}"
    bounds = [t for t in (starts, ends) if t is not None]
    if any(t.dtype != torch.int32 or (t.shape[0] > 1 and t.stride(0) != 1) for t in bounds):
        return "reads starts and ends of groups that are contiguous int32"
    if scale_a is not None and scale_b is not None:
        return scaled.why_not_operands(a, b, scale_a, scale_b, activation, out_dtype)
    if major_a(a) is not Major.K or major_b(b) is None:
        return "needs a contiguous along K, and b along K or N"
    return sm90_operands.why_not(a, b, None, None, activation, out_dtype)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    activation: str,
    config: Config,
) -> None:
    """Rows starts[g] .. ends[g] of d = act(those of a @ b[g]); other rows of d stay as they are.

    d (Ba, R, N_out)   a (Ba, R, K)   b (G, K, N)   scale_a (Ba, R blocks, K blocks)   scale_b (G, N blocks, K blocks)
    starts, ends (G,) int32 on the device; without starts a group begins at the previous end.
    Ba is 1, or G: then rows of group g are those of a[g], without starts from 0 on.  Rows beyond R do not exist,
    whatever ends says.
    """
    batches, m, k = a.shape
    groups, _, n = b.shape
    if 0 in d.shape or groups == 0:
        return
    scaling = model.UNSCALED if scale_a is None or scale_b is None else int(scaling_of(a, b, scale_a, scale_b))
    check_split(config, k, a.itemsize)
    token_rows = min(m, config.tokens)
    weights, tokens = operand_maps(a, b, token_rows)
    params = Params(
        kTokens=config.tokens,
        kStages=config.stages,
        kSplit=config.split,
        kCtas=config.ctas,
        kMnMajor=along_n(b),
        kActivation=ACTIVATIONS.index(activation),
        kScaling=scaling,
        Element=a.dtype,
        Out=d.dtype,
        Bias=d.dtype,
        Addend=d.dtype,
    )
    args = (
        weights,
        tokens,
        *scale_maps(scale_a, scale_b, scaling, model.scale_rows(config.tokens, grouped=True), tokens),
        d,
        0 if starts is None else starts,
        ends,
        0 if scale_a is None else scale_a,
        0 if scale_b is None else scale_b,
        *scale_strides(scale_a, scale_b),
        *d.stride()[:2],
        groups,
        m,
        n,
        k,
        token_rows,
        batches > 1,
        stores_vectors(d),
    )
    # An upper bound: at most as many groups as rows are not empty if groups share one matrix
    token_tiles = -(-m // config.tokens) * groups if batches > 1 else -(-m // config.tokens) + min(groups, m)
    tiles = token_tiles * -(-n // model.BLOCK_N)
    launch(KERNEL, config, model.shared_bytes(config, scaling, grouped=True), tiles, d.device, args, params)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the config of the least predicted time among `CONFIGS`, with room for more rows than expected.

    bucket: rows (expected, of a group), N, K, G, layout, aligned, out_bits, gated, scaling (-1: 16-bit operands)
    """
    work = _work(bucket)
    tokens = _room(work.rows)
    return model.ranked((c for c in model.group_defaults(work.scaling) if c.tokens == tokens), work)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time, with room for the expected rows or more."""
    work = _work(bucket)
    tokens = sorted({_room(work.rows), model.fitting(model.GROUP_TOKENS, work.rows)})
    return tuple(model.ranked(model.space(tokens, work.scaling, grouped=True), work)[:24])


def _room(rows: int) -> int:
    return model.fitting(model.GROUP_TOKENS, rows + rows // 2)


def _work(bucket: tuple[int, ...]) -> Work:
    rows, columns, depth, groups = bucket[:4]
    return Work(rows, columns, depth, bucket[8], groups)


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(
        config
        for scaling in (model.UNSCALED, *Scaling)
        if scaling != Scaling.OTHER
        for config in model.group_defaults(scaling)
    )
)
"""Every config that `configure` can return."""
