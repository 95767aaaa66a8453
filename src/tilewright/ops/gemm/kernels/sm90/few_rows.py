"""Few rows of A, at most 64, against weights that are read once, for Hopper: matmul and bmm of 16-bit operands.

Traffic: N * K elements of weights.  Floor: 7.6 us for 4096 x 4096 in bf16 at 4.4 TB/s.  The tensor cores are mostly
idle; every multiprocessor must keep 64 KB or more in flight, from the first microsecond to the last.  Hence tiles of 64
weight rows, K split over the blocks of a cluster if there are too few tiles, rings that continue across tiles, and a
start that overlaps the end of the previous kernel (programmatic dependent launch: a launch in a chain costs 2.2 to 2.7
us in addition to the reading, 3.3 without it).  Rows of A ("tokens") come from the L2 again for every tile: tokens / 64
bytes for each byte of weights, so 64 tokens double the L2 traffic.

Measured on an H200, 2026-11: 4096 x 4096 at M = 8 takes 9.4 us, cuBLAS 12.6.  Over 11 shapes, tiles of 128 or 256
weight rows and stages of 64 of K gained 0.2 % (geometric mean), clusters that end after one tile nothing, so they were
removed.

`few_rows_scaled.py` has e4m3 operands with scales, `few_rows_grouped.py` groups of rows with their own weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.bmm import FORWARD as BMM
from tilewright.ops.gemm.dense.args import BmmBucket, MatmulArgs, MatmulBucket, as_batch
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows_cost import predicted_us
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    along_n,
    check_split,
    launch_clusters,
    operand_maps,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import A_ALONG_K, MAX_ROWS, UNSCALED, Config, Work
from tilewright.ops.gemm.kernels.sm90.operands import why_not_16_bit, why_not_machine
from tilewright.ops.gemm.matmul import FORWARD as MATMUL
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b


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


class Args(NamedTuple):
    """The parameters of few_rows_gemm."""

    weights: Map
    tokens: Map
    d: Pointer
    bias: Pointer
    c: Pointer
    scale: Pointer
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


KERNEL = CudaKernel(FILE, "few_rows_gemm", Args, archs=("sm_90a",), dependent=True)


def why_not(args: MatmulArgs) -> str | None:
    """Why this kernel cannot run a product; None if it can."""
    return why_not_machine(args.a) or why_not_operands(args)


def why_not_operands(args: MatmulArgs) -> str | None:
    """Why this kernel cannot run these operands and this epilogue; None if it can."""
    if args.a.shape[-2] > MAX_ROWS:
        return f"is for at most {MAX_ROWS} rows of a, got {args.a.shape[-2]}"
    if major_a(args.a) is not Major.K or major_b(args.b) is None:
        return "needs a contiguous along K, and b along K or N"
    return why_not_16_bit(args.a, args.b, args.bias, args.c, args.activation, args.out_dtype)


def configure(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> Config | None:
    """Returns the config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows."""
    if not _few(bucket):
        return None
    work = _work(bucket)
    tokens = model.fitting(model.TOKENS, work.rows)
    return model.ranked((c for c in CONFIGS if c.tokens == tokens), work, predicted_us)[0]


def candidates(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    if not _few(bucket):
        return ()
    work = _work(bucket)
    space = model.space([model.fitting(model.TOKENS, work.rows)], UNSCALED)
    return tuple(model.ranked(space, work, predicted_us)[:24])


def _work(bucket: MatmulBucket | BmmBucket) -> Work:
    return Work(bucket.M, bucket.N, bucket.K, groups=bucket.B if isinstance(bucket, BmmBucket) else 1)


def _few(bucket: MatmulBucket | BmmBucket) -> bool:
    """Returns whether this kernel is the choice; batch-invariant calls pass M = 4096 for every M."""
    return bucket.M <= MAX_ROWS and bucket.layout in A_ALONG_K


CONFIGS: tuple[Config, ...] = model.defaults(UNSCALED)
"""Every config that `configure` can return."""


def gemm(d: Tensor, args: MatmulArgs, config: Config) -> None:
    """d = act(alpha * scale * a @ b + bias) + c; any number of rows is computed right.

    d: (B, M, N_out), contiguous along N_out; a: (B, M, K); b: (B, K, N); c: (B, M, N_out), may be d.
    """
    a, b, bias, c, scale, alpha, activation, _ = args
    batches, m, k = a.shape
    n = b.shape[-1]
    check_split(config, k, a.itemsize)
    token_rows = min(m, config.tokens)  # the box ends with the rows of a; the rest of the tile is not stored
    weights, tokens = operand_maps(a, b, token_rows)
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
    kernel_args = Args(
        weights=weights,
        tokens=tokens,
        d=d,
        bias=bias,
        c=c,
        scale=scale,
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
    launch_clusters(KERNEL, config, model.shared_bytes(config), tiles, d.device, kernel_args, params)


@register_kernel(
    MATMUL, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch(args), config)


@register_kernel(BMM, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not)
def launch_batch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0], args, config)
