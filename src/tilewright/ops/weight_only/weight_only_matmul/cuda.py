"""weight_only_matmul in CUDA C++ for Hopper: the weight streams through shared memory once, as it is stored.

Traffic: N K (1 + 2 / 128) bytes at 8 bits and bf16 scales, N K (1 / 2 + 2 / 128) at 4.  Floor: 7.0
us for 4096 x 14336 of 4 bits, 30.3 MB, at 4.3 TB/s.  At that rate a multiprocessor gets 18 bytes a cycle, 37 integers
of 4 bits, whose conversion takes 1.4 instructions each: half of what it can issue.  Conversions are the second bound,
so everything else uses few instructions: reads of 16 bytes, few permutations, one scale for 128 of K.

The kernel is `sm90_weight_only.cuh`; `model.py` has its configs.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.errors import InputError
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident
from tilewright.ops.gemm.operands import ACTIVATIONS
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.weight_only_matmul import bucket as bucket_of
from tilewright.ops.weight_only.weight_only_matmul import model
from tilewright.ops.weight_only.weight_only_matmul.model import Config, Work

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


KERNEL = CudaKernel(
    Path(__file__).with_name("sm90_weight_only.cuh"),
    "weight_only_matmul",
    "TTTPPqiiii?",
    archs=("sm_90a",),
    dependent=True,
)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the choice of the cost model."""
    return model.chosen(Work(*bucket[:4]))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the 24 configs of least predicted time."""
    work = Work(*bucket[:4])
    tokens = next((t for t in model.TOKENS if t >= work.rows), model.TOKENS[-1])
    return tuple(model.ranked(model.space(work.bits, tokens), work)[:24])


CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys((*model.defaults(8), *model.defaults(4))))
"""Every config that `configure` can return."""


def why_not(
    x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    arch = device_info(x.device).arch
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    if any(t is not None and t.dtype == torch.float64 for t in (scales, bias)):
        return "has no float64"
    if not bucket_of(x, q, scales, bias, activation, out_dtype)[4]:
        return (
            "needs x, q and scales at multiples of 16 bytes, rows too, and scales of consecutive rows side by side, as "
            "quantize_weight lays them"
        )
    return None


@register_impl(
    "weight_only_matmul",
    backend="cuda",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=why_not,
)
def launch(
    outs: tuple[Tensor],
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    (d,) = outs
    m, k = x.shape
    n, bits = q.shape[0], packing.bits_of(q)
    if config.split > model.steps(k, bits):
        raise InputError(
            f"weight_only_matmul: split={config.split} leaves blocks without work, K={k} has "
            f"{model.steps(k, bits)} steps of {model.stage_k(bits)}; take a split of at most that."
        )
    token_rows = min(m, config.tokens)  # the box ends with the rows of x; the rest of the tile is not stored
    params = Params(
        bits,
        *config,
        ACTIVATIONS.index(activation),
        x.dtype,
        scales.dtype,
        d.dtype,
        x.dtype if bias is None else bias.dtype,
    )
    args = (
        tensor_map(q, (config.rows, model.SPAN), swizzle=model.SPAN),
        tensor_map(x, (token_rows, model.TOKEN_K), swizzle=model.SPAN),
        tensor_map(scales.T, (model.stage_k(bits) // model.GROUP, config.rows)),
        d,
        0 if bias is None else bias,
        d.stride(0),
        m,
        n,
        k,
        token_rows,
        collecting() is None and _stores_vectors(d),
    )
    tiles = -(-m // config.tokens) * -(-n // config.rows)
    clusters = min(tiles, resident(config.split, config.ctas, usable_sms(d.device)))
    KERNEL(
        (clusters * config.split,),
        args,
        params,
        block=config.threads,
        shared_bytes=model.shared_bytes(config, bits, scales.element_size()),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )


def _stores_vectors(d: Tensor) -> bool:
    """Returns whether four neighbouring results (two of "swiglu") can be stored at once in every row of d."""
    vector = _WIDTH * d.itemsize
    return d.data_ptr() % vector == 0 and d.stride(0) * d.itemsize % vector == 0
