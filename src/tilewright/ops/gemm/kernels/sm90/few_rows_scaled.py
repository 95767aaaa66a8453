"""Few rows of e4m3 operands with scales, in every granularity of `Scaling`, for Hopper: scaled_matmul.

Weights take half the bytes: 3.8 us for 4096 x 4096 at 4.4 TB/s, about as long as the launch.  Scales of 128 of K come
through the ring with their operands, except those of 128 x 128 weights: one float for a tile and 128 of K, 32 of which
the lanes of a warp load at once, a tile or 16 stages early, since each new sector comes from memory.  They are applied
when products are promoted to float32, during the next WGMMAs.  Scales of whole rows and tensors are applied in the
epilogue.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.dispatch.bucket import hint
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    check_split,
    launch_clusters,
    operand_maps,
    scale_maps,
    scale_strides,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS, Config, Work
from tilewright.ops.gemm.kernels.sm90.operands import why_not_machine, why_not_scaled
from tilewright.ops.gemm.operands import ACTIVATIONS
from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulArgs, as_batch
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of
from tilewright.ops.gemm.scaled_matmul import FORWARD


class Params(NamedTuple):
    """The compile-time constants of few_rows_scaled_gemm."""

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


class Args(NamedTuple):
    """The parameters of few_rows_scaled_gemm."""

    weights: Map
    tokens: Map
    weight_scales: Map
    token_scales: Map
    d: Pointer
    bias: Pointer
    c: Pointer
    scale_a: Pointer
    scale_b: Pointer
    scale_a_batch: I64
    scale_b_batch: I64
    scale_b_row: I64
    d_batch: I64
    d_row: I64
    c_batch: I64
    c_row: I64
    alpha: F32
    m: I32
    n: I32
    k: I32
    batches: I32
    token_rows: I32
    vectors: bool


KERNEL = CudaKernel(FILE, "few_rows_scaled_gemm", Args, archs=("sm_90a",), dependent=True)


def why_not(args: ScaledMatmulArgs) -> str | None:
    """Why this kernel cannot run a scaled product; None if it can."""
    a, b, scale_a, scale_b, bias, c, _, activation, out_dtype = args
    reason = why_not_machine(a)
    if reason is None and hint(a.shape[-2]) > MAX_ROWS:
        reason = f"is for at most {MAX_ROWS} rows of a, got {a.shape[-2]}"
    return reason or why_not_scaled(a, b, scale_a, scale_b, bias, c, activation, out_dtype)


def configure(bucket: ScaledBucket, dtype: torch.dtype) -> Config | None:
    """Returns the config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows.

    Batch-invariant calls pass M = 4096 for any M, and get None.
    """
    if bucket.M > MAX_ROWS:
        return None
    work = _work(bucket)
    tokens = model.fitting(model.TOKENS, work.rows)
    return model.ranked((c for c in model.defaults(work.scaling) if c.tokens == tokens), work)[0]


def candidates(bucket: ScaledBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    if bucket.M > MAX_ROWS:
        return ()
    work = _work(bucket)
    return tuple(model.ranked(model.space([model.fitting(model.TOKENS, work.rows)], work.scaling), work)[:24])


def _work(bucket: ScaledBucket) -> Work:
    return Work(bucket.M, bucket.N, bucket.K, bucket.scaling)


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(config for scaling in Scaling if scaling is not Scaling.OTHER for config in model.defaults(scaling))
)
"""Every config that `configure` can return."""


def gemm(d: Tensor, args: ScaledMatmulArgs, config: Config) -> None:
    """d = act(alpha * (scale_a * a) @ (scale_b * b) + bias) + c; any number of rows is computed right.

    d (B, M, N_out)   a (B, M, K)   b (B, K, N)   scale_a (B, M blocks, K blocks)   scale_b (B, N blocks, K blocks)
    """
    a, b, scale_a, scale_b, bias, c, alpha, activation, _ = args
    batches, m, k = a.shape
    n = b.shape[-1]
    scaling = int(scaling_of(a, b, scale_a, scale_b))
    check_split(config, k, a.itemsize)
    token_rows = min(m, config.tokens)  # the box ends with the rows of a; the rest of the tile is not stored
    weights, tokens = operand_maps(a, b, token_rows)
    params = Params(
        kTokens=config.tokens,
        kStages=config.stages,
        kSplit=config.split,
        kCtas=config.ctas,
        kMnMajor=False,
        kActivation=ACTIVATIONS.index(activation),
        kScaling=scaling,
        Element=a.dtype,
        Out=d.dtype,
        Bias=d.dtype if bias is None else bias.dtype,
        Addend=d.dtype if c is None else c.dtype,
    )
    token_box_rows = model.scale_rows(config.tokens, grouped=False)
    weight_scales, token_scales = scale_maps(scale_a, scale_b, scaling, token_box_rows, tokens)
    scale_a_batch, scale_b_batch, scale_b_row = scale_strides(scale_a, scale_b)
    kernel_args = Args(
        weights=weights,
        tokens=tokens,
        weight_scales=weight_scales,
        token_scales=token_scales,
        d=d,
        bias=bias,
        c=c,
        scale_a=scale_a,
        scale_b=scale_b,
        scale_a_batch=scale_a_batch,
        scale_b_batch=scale_b_batch,
        scale_b_row=scale_b_row,
        d_batch=d.stride(0),
        d_row=d.stride(1),
        c_batch=0 if c is None else c.stride(0),
        c_row=0 if c is None else c.stride(1),
        alpha=float(alpha),
        m=m,
        n=n,
        k=k,
        batches=batches,
        token_rows=token_rows,
        vectors=stores_vectors(d),
    )
    tiles = batches * -(-m // config.tokens) * -(-n // model.BLOCK_N)
    launch_clusters(KERNEL, config, model.shared_bytes(config, scaling), tiles, d.device, kernel_args, params)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: ScaledMatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch("scaled_matmul", args), config)
