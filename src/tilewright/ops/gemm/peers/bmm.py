"""Other batched GEMMs: cuBLAS as torch calls it."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer, Problem, eager
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}


def _cublas(sample: Sample) -> Call | None:
    p = Problem.of(sample)
    if p.a.dtype == torch.float8_e4m3fn or isinstance(p.alpha, Tensor) or p.alpha != 1.0:
        return None
    if p.a.dtype != p.out_dtype:
        options: dict[str, Any] = {"out_dtype": p.out_dtype}
        return (lambda: torch.bmm(p.a, p.b, **options)) if p.plain else None
    if p.plain:
        return lambda: torch.bmm(p.a, p.b)
    if p.bias is None:
        return lambda: eager(torch.bmm(p.a, p.b), p.c, p.activation)
    bias = p.bias
    return lambda: eager(torch.baddbmm(bias, p.a, p.b), p.c, p.activation)


PEERS = (GpuPeer("cublas", None, _cublas),)
