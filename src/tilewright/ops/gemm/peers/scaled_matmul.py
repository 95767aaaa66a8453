"""Other scaled products: cuBLAS in every scaling that `torch._scaled_mm` takes, and DeepGEMM.

    cublas_block, cublas_row   the same problem, with the row's own scales
    cublas_tensor              an easier problem: one scale for each operand, the others folded into its elements, which
                               is exact for the `binary` scales of the workloads; the answer is the same
    cublas_tensor_fast         the same with sums that stay in the tensor core's 14 bits

The reference is cuBLAS as well, so eager torch and torch.compile would be the same kernels again.  Layouts that a
library needs are made before anything is timed.
"""

from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.gemm.peers.matmul import GpuPeer, eager
from tilewright.ops.gemm.scaled.cublas import scales_for
from tilewright.ops.gemm.scaled.scaling import Scaling, granularity, scaling_of
from tilewright.ops.peer import Call
from tilewright.ops.quant.numbers import spread

REPLACES = {"cuda": ("eager", "compile")}


class Problem(NamedTuple):
    """One call: a (M, K), b (K, N), both contiguous along K, scale_b of b.mT."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    c: Tensor | None
    activation: str | None
    out_dtype: torch.dtype

    @classmethod
    def of(cls, sample: Sample) -> "Problem":
        """Returns the problem of a sample of `scaled_matmul`."""
        a, b, scale_a, scale_b = sample.args
        bias, c, activation = (sample.kwargs.get(name) for name in ("bias", "c", "activation"))
        out_dtype = sample.kwargs.get("out_dtype") or torch.bfloat16
        return cls(a, b, scale_a, scale_b.mT, bias, c, activation, out_dtype)

    @property
    def scaling(self) -> Scaling:
        """How it is scaled."""
        return scaling_of(self.a, self.b, self.scale_a, self.scale_b)


def _cublas(sample: Sample, among: tuple[Scaling, ...]) -> Call | None:
    p = Problem.of(sample)
    if p.scaling not in among:
        return None
    return _product(p, p.a, p.b, *scales_for(p.scaling, p.scale_a, p.scale_b, p.a, p.b.mT), fast=False)


def _cublas_tensor(sample: Sample, *, fast: bool) -> Call | None:
    p = Problem.of(sample)
    a, scale_a = _folded(p.a, p.scale_a)
    b, scale_b = _folded(p.b.mT, p.scale_b)
    return None if a is None or b is None else _product(p, a, b.mT, scale_a, scale_b, fast=fast)


def _product(p: Problem, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Call | None:
    """The product, then the epilogue by torch's own ops; cuBLAS fuses the bias."""
    if p.bias is not None and p.bias.dtype != p.out_dtype:
        return None
    multiply = partial(torch._scaled_mm, a, b, scale_a, scale_b, p.bias, out_dtype=p.out_dtype, use_fast_accum=fast)
    if p.activation is None and p.c is None:
        return multiply
    return lambda: eager(multiply(), p.c, p.activation)


def _folded(q: Tensor, scales: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns (q', scale), equal to q and its scales; (None, _) if e4m3 cannot hold q'."""
    layout = granularity(scales.shape, *q.shape)
    assert layout is not None
    least = scales.min()
    exact = q.float() * (spread(scales, layout, *q.shape) / least)
    rescaled = exact.to(FP8)
    return (rescaled if torch.equal(rescaled.float(), exact) else None), least


def _deep_gemm(sample: Sample) -> Call | None:
    """On Hopper (1, 128, 128) makes bf16 without an addend, (1, 1, 128) adds to float32."""
    p = Problem.of(sample)
    if p.bias is not None or p.activation is not None:
        return None
    block = p.scaling is Scaling.TOKEN_BLOCK and p.out_dtype == torch.bfloat16 and p.c is None
    token = p.scaling is Scaling.TOKEN_TOKEN and p.c is not None and p.out_dtype == p.c.dtype == torch.float32
    if not (block or token):
        return None
    multiply = import_module("deep_gemm").fp8_gemm_nt
    recipe = (1, 128, 128) if block else (1, 1, 128)

    def call() -> Tensor:
        d = torch.empty(p.a.shape[0], p.b.shape[1], dtype=p.out_dtype, device=p.a.device)
        multiply((p.a, p.scale_a), (p.b.mT, p.scale_b), d, c=p.c, recipe=recipe)
        return d

    return call


PEERS = (
    GpuPeer("cublas_block", None, partial(_cublas, among=(Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN))),
    GpuPeer("cublas_row", None, partial(_cublas, among=(Scaling.ROW,))),
    GpuPeer("cublas_tensor", None, partial(_cublas_tensor, fast=False)),
    GpuPeer("cublas_tensor_fast", None, partial(_cublas_tensor, fast=True)),
    GpuPeer("deep_gemm", "deep_gemm", _deep_gemm),
)
