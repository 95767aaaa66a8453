"""e4m3 operands with scales, in every granularity of `Scaling`.

Weights take half the bytes: 3.8 us for 4096 x 4096 at 4.4 TB/s, about as long as the launch.  Scales of 128 of K come
through the ring with their operands, except those of 128 x 128 weights: one float for a tile and 128 of K, 32 of which
the lanes of a warp load at once, a tile or 16 stages early, since each new sector comes from memory.  They are applied
when products are promoted to float32, during the next WGMMAs.  Scales of whole rows and tensors are applied in the
epilogue.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows_launch import (
    FILE,
    check_split,
    launch,
    operand_maps,
    scale_maps,
    scale_strides,
    stores_vectors,
)
from tilewright.ops.gemm.kernels.sm90.few_rows_model import Config, Work
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, aligned, columns_out, copyable, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of
from tilewright.ops.quant.layout import TOKEN

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


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


KERNEL = CudaKernel(FILE, "few_rows_scaled_gemm", "TTTTPPPPPqqqqqqqfiiiii?", archs=("sm_90a",), dependent=True)


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
    """Why this engine cannot run these arguments; None if it can.  a (..., M, K), b (..., K, N)"""
    if a.shape[-2] > model.MAX_ROWS:
        return f"is for at most {model.MAX_ROWS} rows of a, got {a.shape[-2]}"
    if any(t is not None and t.dtype not in _OUTPUTS for t in (bias, c)):
        return "takes a bias and an addend of bf16, fp16 or fp32"
    return why_not_operands(a, b, scale_a, scale_b, activation, out_dtype)


def why_not_operands(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, activation: str, out_dtype: torch.dtype
) -> str | None:
    """Why the operands and their scales cannot run; None if they can."""
    if a.dtype != torch.float8_e4m3fn or b.dtype != a.dtype:
        return f"multiplies e4m3 operands by scales, got {a.dtype} and {b.dtype}"
    if out_dtype not in _OUTPUTS:
        return f"writes a result of bf16, fp16 or fp32, not {out_dtype}"
    if major_a(a) is not Major.K or major_b(b) is not Major.K:
        return "needs 8-bit operands contiguous along K: a, and b.mT"
    if not aligned(a, b, columns_out(b.shape[-1], activation), out_dtype):
        return "needs addresses, strides and rows of the result that are multiples of 16 bytes"
    scaling = scaling_of(a, b, scale_a, scale_b)
    if scaling is Scaling.OTHER:
        return f"has no form for scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
    scale_args = ("scale_a", scale_a, a.shape[-2]), ("scale_b", scale_b, b.shape[-1])
    for layout, (name, scales, rows) in zip(scaling.layouts, scale_args, strict=True):
        reason = layout.mismatch(scales, rows, a.shape[-1])
        if reason is None and layout is TOKEN and not copyable(scales):
            reason = "do not start at, or step by, a multiple of 16 bytes"
        if reason is not None:
            return f"reads scales as they lie, and {name} {reason}"
    return None


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
) -> None:
    """d = act(alpha * (scale_a * a) @ (scale_b * b) + bias) + c; any number of rows is computed right.

    d (B, M, N_out)   a (B, M, K)   b (B, K, N)   scale_a (B, M blocks, K blocks)   scale_b (B, N blocks, K blocks)
    """
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
    args = (
        weights,
        tokens,
        *scale_maps(scale_a, scale_b, scaling, model.scale_rows(config.tokens, grouped=False), tokens),
        d,
        0 if bias is None else bias,
        0 if c is None else c,
        scale_a,
        scale_b,
        *scale_strides(scale_a, scale_b),
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
    launch(KERNEL, config, model.shared_bytes(config, scaling), tiles, d.device, args, params)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows.

    bucket: M, N, K, layout, aligned, out_bits, epilogue, scaling
    """
    work = _work(bucket)
    tokens = model.fitting(model.TOKENS, work.rows)
    return model.ranked((c for c in model.defaults(work.scaling) if c.tokens == tokens), work)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    work = _work(bucket)
    return tuple(model.ranked(model.space([model.fitting(model.TOKENS, work.rows)], work.scaling), work)[:24])


def _work(bucket: tuple[int, ...]) -> Work:
    rows, columns, depth = bucket[:3]
    return Work(rows, columns, depth, bucket[7])


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(config for scaling in Scaling if scaling is not Scaling.OTHER for config in model.defaults(scaling))
)
"""Every config that `configure` can return."""
