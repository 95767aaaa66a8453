"""weight_only_matmul in CUDA C++ for Hopper: the weight streams through shared memory once, as it is stored.

Traffic: N K (1 + 2 / 128) bytes at 8 bits and bf16 scales, N K (1 / 2 + 2 / 128) at 4.  Floor: 7.0
us for 4096 x 14336 of 4 bits, 30.3 MB, at 4.3 TB/s.  At that rate a multiprocessor gets 18 bytes a cycle, 37 integers
of 4 bits, whose conversion takes 1.4 instructions each: half of what it can issue.  Conversions are the second bound,
so everything else uses few instructions: reads of 16 bytes, few permutations, one scale for 128 of K.

The kernel is `weight_only_matmul.cuh`; `weight_only_model.py` has its configs.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.errors import InputError
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.compilers.kernel_args import I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident
from tilewright.ops.gemm.operands import ACTIVATIONS
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import weight_only_model as model
from tilewright.ops.weight_only.kernels.sm90.weight_only_model import Config, Work
from tilewright.ops.weight_only.weight_only_matmul import (
    FORWARD,
    WeightOnlyMatmulArgs,
    WeightOnlyMatmulBucket,
    bucket_of,
)

_WIDTH = 4  # results that a thread stores at once


class Params(NamedTuple):
    """The compile-time constants of the kernel."""

    kBits: int
    kTokens: int
    kTiles: int
    kWarps: int
    kStages: int
    kSplit: int
    kCtas: int
    kActivation: int
    Element: torch.dtype
    Scale: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype


class Args(NamedTuple):
    """The parameters of the kernel."""

    weights: Map
    tokens: Map
    scales: Map
    d: Pointer
    bias: Pointer
    d_row: I64  # elements from row to row of d
    m: I32
    n: I32
    k: I32
    token_rows: I32  # of a box of tokens
    vectors: bool  # a thread stores its results at once


KERNEL = CudaKernel(
    Path(__file__).with_name("weight_only_matmul.cuh"),
    "weight_only_matmul",
    Args,
    archs=("sm_90a",),
    dependent=True,
)


def _work(bucket: WeightOnlyMatmulBucket) -> Work:
    return Work(bucket.M, bucket.N, bucket.K, bucket.bits)


def configure(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> Config:
    """Returns the choice of the cost model."""
    return model.chosen(_work(bucket))


def candidates(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    work = _work(bucket)
    tokens = next((t for t in model.TOKENS if t >= work.m), model.TOKENS[-1])
    return tuple(model.ranked(model.space(work.bits, tokens), work)[:24])


CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys((*model.defaults(8), *model.defaults(4))))
"""Every config that `configure` can return."""


def why_not(args: WeightOnlyMatmulArgs) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    arch = device_info(args.x.device).arch
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    if reason := no_float64(args.scales, args.bias):
        return reason
    if not bucket_of(args).aligned:
        return (
            "needs x, q and scales at multiples of 16 bytes, rows too, and scales of consecutive rows side by side, as "
            "quantize_weight lays them"
        )
    return None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: WeightOnlyMatmulArgs, config: Config) -> None:
    (d,) = outs
    x, q, scales, bias = args.x, args.q, args.scales, args.bias
    (m, k), n, bits = x.shape, q.shape[0], packing.bits_of(q)
    if config.split > model.k_blocks(k, bits):
        raise InputError(
            f"weight_only_matmul: split={config.split} leaves blocks without work, K={k} has "
            f"{model.k_blocks(k, bits)} steps of {model.stage_k(bits)}; take a split of at most that."
        )
    token_rows = min(m, config.tokens)  # the box ends with the rows of x; the rest of the tile is not stored
    params = Params(
        bits,
        *config,
        ACTIVATIONS.index(args.activation),
        x.dtype,
        scales.dtype,
        d.dtype,
        x.dtype if bias is None else bias.dtype,
    )
    kernel_args = Args(
        weights=tensor_map(q, (config.rows, model.SPAN), swizzle=model.SPAN),
        tokens=tensor_map(x, (token_rows, model.TOKEN_K), swizzle=model.SPAN),
        scales=tensor_map(scales.T, (model.stage_k(bits) // model.GROUP, config.rows)),
        d=d,
        bias=bias,
        d_row=d.stride(0),
        m=m,
        n=n,
        k=k,
        token_rows=token_rows,
        vectors=collecting() is None and _stores_vectors(d),
    )
    tiles = -(-m // config.tokens) * -(-n // config.rows)
    clusters = min(tiles, resident(config.split, config.ctas, usable_sms(d.device)))
    KERNEL(
        (clusters * config.split,),
        kernel_args,
        params,
        block=config.threads,
        shared_bytes=model.shared_bytes(config, bits, scales.element_size()),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )


def _stores_vectors(d: Tensor) -> bool:
    """Returns whether four neighbouring results (two of "swiglu") can be stored at once in every row of d."""
    vector = _WIDTH * d.itemsize
    return d.data_ptr() % vector == 0 and d.stride(0) * d.itemsize % vector == 0
