"""fused_moe in Triton: the order of slots, a product that gathers its rows and gates them, a second one, the combine.

The first product is persistent, as `gemm.grouped_rows` is, which is the second one.  It reads rows of x by the slots of
its tile, so x is never written in another order, and multiplies them with a tile of gates and the tile of ups that
belongs to it, so that the 2 I columns are never written.  What is written between the steps: T*k*(I + H) elements.

6*T*k*H*I flops, and the weights of all experts that have tokens once: 4096 tokens, 128 experts, k = 8, 7168 x 2048 in
bf16 are 2.9 Tflop, 3.6 ms at 800 TFLOP/s; with 64 tokens 11 GB, 2.5 ms at 4.4 TB/s.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import plain_strides
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.grouped.args import (
    GroupedArgs,
    KGroupedArgs,
    grouped_bucket,
    k_grouped_bucket,
    plain_grouped_args,
)
from tilewright.ops.gemm.kernels.triton import grouped_rows, k_grouped
from tilewright.ops.gemm.kernels.triton import tiles as tiling
from tilewright.ops.gemm.kernels.triton.grouped_rows import GROUPS
from tilewright.ops.gemm.kernels.triton.grouped_tiles import launch_with_descriptors
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBackwardArgs, FusedMoeBucket, expected_rows
from tilewright.ops.moe.fused_moe import BACKWARD, FORWARD
from tilewright.ops.moe.kernels import pipeline
from tilewright.ops.moe.kernels.backward import backward
from tilewright.ops.moe.kernels.triton.fused_moe_kernel import gated_rows_kernel
from tilewright.ops.moe.kernels.triton.moe_align import MOST_EXPERTS
from tilewright.ops.moe.kernels.triton.moe_permute import MOST_CHOSEN
from tilewright.ops.rows import as_rows, no_float64


class Config(NamedTuple):
    """A tile of the first product: block_m rows by block_n gates and as many ups, block_k elements of H at a time.
    Other products are chosen for experts of block_m rows.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int


_FLOAT32 = Config(32, 32, 32, 4, 2, 8)
_ROWS_16, _ROWS_32, _ROWS_64 = (Config(m, 64, 128, 4, 3, 8) for m in (16, 32, 64))
_MANY = Config(128, 128, 64, 8, 4, 8)
_UNALIGNED = Config(64, 64, 16, 4, 3, 8)
TRAINED_ROWS = 128  # of an expert, for which the products of the backward are chosen: training has many
CONFIGS = (_FLOAT32, _ROWS_16, _ROWS_32, _ROWS_64, _MANY, _UNALIGNED)


def configure(bucket: FusedMoeBucket, dtype: torch.dtype) -> Config:
    """Chooses rows for those that an expert has on average.  Unmeasured."""
    if dtype == torch.float32:
        return _FLOAT32
    expected = expected_rows(bucket)
    if expected > 64:
        return _MANY if bucket.aligned else _UNALIGNED
    if not bucket.aligned:
        return _UNALIGNED
    return _ROWS_16 if expected <= 16 else _ROWS_32 if expected <= 32 else _ROWS_64


def candidates(bucket: FusedMoeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    expected = expected_rows(bucket)
    if dtype == torch.float32:
        return (_FLOAT32, Config(64, 32, 16, 4, 3, 8))
    if expected <= 64:
        return tuple(Config(m, n, k, 4, 3, 8) for m in (16, 32, 64) for n, k in ((32, 128), (64, 64), (64, 128)))
    return tuple(
        Config(m, n, 64, warps, stages, 8)
        for m, n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
        for stages in (3, 4)
    )


def why_not(args: FusedMoeArgs | FusedMoeBackwardArgs) -> str | None:
    x, w1, w2 = args.x, args.w1, args.w2
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (w1, w2)):
        return "needs w1 and w2 contiguous along their last dimension"
    if w1.shape[0] > MOST_EXPERTS or args.topk_ids.shape[1] > MOST_CHOSEN:
        return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"
    return no_float64(x)


_kernel = TritonKernel(gated_rows_kernel)


def gated_rows(hidden: Tensor, args: FusedMoeArgs, rows: pipeline.Order, config: Config) -> None:
    """hidden (T * k, I) = the gated first product of the rows in this order; rows of dropped slots are not written."""
    x, w1 = as_rows(args.x), args.w1
    experts, twice, width = w1.shape
    inner = twice // 2
    count = rows.slots.shape[0]
    arch = target_of(x)
    # One column may have rows a step of one apart, which a descriptor of rows cannot take
    descriptors = tiling.has_descriptors(arch) and copyable(w1) and width > 1
    stride_we, stride_wn, _ = plain_strides(w1)
    if arch.startswith("sm_8"):
        config = config._replace(block_n=min(config.block_n, 64))  # operands of its products lie in registers
    if arch.startswith("gfx"):
        config = config._replace(num_stages=1 if width % config.block_k else 2)  # masks take scalar registers
    shared = tiling.SHARED_BYTES.get(arch, tiling.SHARED_ELSEWHERE)
    stage = (config.block_m + 2 * config.block_n) * config.block_k * x.element_size()
    stages = max(1, min(config.num_stages, shared // stage))
    config = config._replace(num_stages=stages)
    vector = 16 // x.element_size()
    is_aligned = copyable(x) and copyable(w1) and width % vector == 0
    tiles = (triton.cdiv(count, config.block_m) + min(experts, count)) * triton.cdiv(inner, config.block_n)
    programs = max(1, shared // (stages * stage))
    launch_with_descriptors(
        _kernel,
        (max(1, min(tiles, min(programs, 2) * usable_sms(x.device))),),
        (
            hidden, x, w1, rows.slots, rows.starts, rows.ends, args.topk_ids.shape[1], experts, count, inner, width,
            x.stride(0), stride_we, stride_wn,
        ),
        (
            args.activation, descriptors, width % config.block_k == 0, vector if is_aligned else 1,
            x.shape[0] * x.stride(0) >= 1 << 31, GROUPS, config.group_m, config.block_m, config.block_n, config.block_k,
        ),
        config,
    )  # fmt: skip


class Products:
    """The grouped products of `gemm` in Triton."""

    def rows(self, d: Tensor, args: GroupedArgs) -> None:
        """d (1, S, N) = rows of each group of a (1, S, K) times its b (G, K, N)."""
        grouped_rows.gemm(d, args, grouped_rows.configure(grouped_bucket(args), args.a.dtype))

    def along_k(self, d: Tensor, args: KGroupedArgs) -> None:
        """d (G, M, N) = a (M, S) times b (S, N), of the rows of each group."""
        k_grouped.gemm(d, args, k_grouped.configure(k_grouped_bucket(args), args.a.dtype))


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: FusedMoeArgs, config: Config) -> None:
    x, w2 = args.x, args.w2
    rows = pipeline.order(args, config.block_m)
    hidden = scratch((rows.slots.shape[0], w2.shape[2]), x.dtype, x.device)
    gated_rows(hidden, args, rows, config)
    y = scratch((rows.slots.shape[0], w2.shape[1]), x.dtype, x.device)
    limits = rows.starts, rows.ends, rows.expected_rows
    Products().rows(y[None], plain_grouped_args(hidden[None], w2.mT, *limits, x.dtype))
    pipeline.combine(outs[0], y, args, rows)


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch_backward(outs: tuple[Tensor, ...], args: FusedMoeBackwardArgs, config: Config) -> None:
    backward(outs, args, Products(), TRAINED_ROWS)
