"""Few rows a group, each group with its own weights, for Hopper: grouped_matmul and masked_matmul, experts with few
tokens at the speed of reading their weights.

Only the device knows which rows a group has.  Each warp counts the tiles of 128 groups at a time from starts and ends,
by a prefix sum over its lanes, and finds its tile: no table in memory, no extra launch, any number of groups.  A tile
is 64 rows of weights by the tokens of a group; tokens of the next group in the same box are multiplied but not stored.
Groups have more rows than expected as often as fewer, so tiles have room for half as many tokens again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.dispatch.bucket import hint
from tilewright.jit.compilers.kernel_args import I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.grouped.args import GroupedArgs, GroupedBucket
from tilewright.ops.gemm.grouped_matmul import FORWARD as GROUPED
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    along_n,
    check_split,
    launch_clusters,
    operand_maps,
    scale_maps,
    scale_strides,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import A_ALONG_K, MAX_ROWS, Config, Work
from tilewright.ops.gemm.kernels.sm90.grouping import why_not_rows, write_rows
from tilewright.ops.gemm.masked_matmul import FORWARD as MASKED
from tilewright.ops.gemm.operands import ACTIVATIONS, copyable
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of
from tilewright.ops.quant.layout import TOKEN


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
    kHalves: bool = False


class Args(NamedTuple):
    """The parameters of few_rows_grouped_gemm."""

    weights: Map
    tokens: Map
    weight_scales: Map
    token_scales: Map
    d: Pointer
    starts: Pointer
    ends: Pointer
    scale_a: Pointer
    scale_b: Pointer
    scale_a_batch: I64
    scale_b_batch: I64
    scale_b_row: I64
    d_batch: I64
    d_row: I64
    groups: I32
    m: I32
    n: I32
    k: I32
    token_rows: I32
    masked: bool
    vectors: bool


KERNEL = CudaKernel(FILE, "few_rows_grouped_gemm", Args, archs=("sm_90a",), dependent=True)


def why_not(args: GroupedArgs) -> str | None:
    """Why this kernel cannot run groups of rows; None if it can.  a (1 or G, R, K), b (G, K, N)"""
    if hint(args.expected_rows) > MAX_ROWS:
        return f"is for groups of at most {MAX_ROWS} expected rows, got {args.expected_rows}"
    bounds = [t for t in (args.starts, args.ends) if t is not None]
    if any(t.dtype != torch.int32 or (hint(t.shape[0]) > 1 and hint(t.stride(0)) != 1) for t in bounds):
        return "reads starts and ends of groups that are contiguous int32"
    return why_not_rows(args) or _why_not_scales(args)


def _why_not_scales(args: GroupedArgs) -> str | None:
    """Why the kernel cannot read the scales in place; None if it can, or if there are none."""
    a, b, scale_a, scale_b = args.a, args.b, args.scale_a, args.scale_b
    if scale_a is None or scale_b is None:
        return None
    scale_args = ("scale_a", scale_a, a.shape[-2]), ("scale_b", scale_b, b.shape[-1])
    for layout, (name, scales, rows) in zip(scaling_of(a, b, scale_a, scale_b).layouts, scale_args, strict=True):
        reason = layout.mismatch(scales, rows, a.shape[-1])
        if reason is None and layout is TOKEN and not copyable(scales):
            reason = "do not start at, or step by, a multiple of 16 bytes"
        if reason is not None:
            return f"reads scales as they lie, and {name} {reason}"
    return None


def configure(bucket: GroupedBucket, dtype: torch.dtype) -> Config | None:
    """Returns the config of the least predicted time among `CONFIGS`, with room for more rows than expected."""
    if not _few(bucket):
        return None
    work = _work(bucket)
    tokens = _room(work.rows)
    return model.ranked((c for c in model.group_defaults(work.scaling) if c.tokens == tokens), work)[0]


def candidates(bucket: GroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time, with room for the expected rows or more."""
    if not _few(bucket):
        return ()
    work = _work(bucket)
    tokens = sorted({_room(work.rows), model.fitting(model.GROUP_TOKENS, work.rows)})
    return tuple(model.ranked(model.space(tokens, work.scaling, grouped=True), work)[:24])


def _few(bucket: GroupedBucket) -> bool:
    return bucket.rows <= MAX_ROWS and bucket.layout in A_ALONG_K


def _room(rows: int) -> int:
    return model.fitting(model.GROUP_TOKENS, rows + rows // 2)


def _work(bucket: GroupedBucket) -> Work:
    return Work(bucket.rows, bucket.N, bucket.K, bucket.scaling, bucket.G)


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(
        config
        for scaling in (model.UNSCALED, *Scaling)
        if scaling != Scaling.OTHER
        for config in model.group_defaults(scaling)
    )
)
"""Every config that `configure` can return."""


def gemm_rows(d: Tensor, args: GroupedArgs, config: Config, *, halves: bool = False) -> None:
    """Rows starts[g] .. ends[g] of d = act(those of a @ b[g]); other rows of d stay as they are.

    d (Ba, R, N_out)   a (Ba, R, K)   b (G, K, N)   scale_a (Ba, R blocks, K blocks)   scale_b (G, N blocks, K blocks)
    starts, ends (G,) int32 on the device; without starts a group begins at the previous end.
    Ba is 1, or G: then rows of group g are those of a[g], without starts from 0 on.  Rows beyond R do not exist,
    whatever ends says.
    halves: the gate of "swiglu" is the first half of N, not every second column; b is contiguous along K, and dense.
    """
    a, b, scale_a, scale_b, starts, ends, _, activation, _ = args
    batches, m, k = a.shape
    groups, _, n = b.shape
    if 0 in d.shape or groups == 0:
        return
    scaling = model.UNSCALED if scale_a is None or scale_b is None else int(scaling_of(a, b, scale_a, scale_b))
    check_split(config, k, a.itemsize)
    token_rows = min(m, config.tokens)
    weights, tokens = operand_maps(a, b, token_rows, halves)
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
        kHalves=halves,
    )
    token_box_rows = model.scale_rows(config.tokens, grouped=True)
    weight_scales, token_scales = scale_maps(scale_a, scale_b, scaling, token_box_rows, tokens)
    scale_a_batch, scale_b_batch, scale_b_row = scale_strides(scale_a, scale_b)
    kernel_args = Args(
        weights=weights,
        tokens=tokens,
        weight_scales=weight_scales,
        token_scales=token_scales,
        d=d,
        starts=starts,
        ends=ends,
        scale_a=scale_a,
        scale_b=scale_b,
        scale_a_batch=scale_a_batch,
        scale_b_batch=scale_b_batch,
        scale_b_row=scale_b_row,
        d_batch=d.stride(0),
        d_row=d.stride(1),
        groups=groups,
        m=m,
        n=n,
        k=k,
        token_rows=token_rows,
        masked=batches > 1,
        vectors=stores_vectors(d),
    )
    # An upper bound: at most as many groups as rows are not empty if groups share one matrix
    token_tiles = -(-m // config.tokens) * groups if batches > 1 else -(-m // config.tokens) + min(groups, m)
    tiles = token_tiles * -(-n // model.BLOCK_N)
    shared_bytes = model.shared_bytes(config, scaling, grouped=True)
    launch_clusters(KERNEL, config, shared_bytes, tiles, d.device, kernel_args, params)


def launch(outs: tuple[Tensor], args: GroupedArgs, config: Config) -> None:
    write_rows(outs[0], args, lambda d: gemm_rows(d, args, config))


for _op in (GROUPED, MASKED):
    register_kernel(
        _op, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
    )(launch)
