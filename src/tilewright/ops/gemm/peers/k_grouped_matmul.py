"""torch's grouped product, which rounds to bfloat16, and a loop over cuBLAS that knows the sizes beforehand."""

from typing import Any

import torch

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.groups import REPLACES, slices
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.peer import Call

__all__ = ["PEERS", "REPLACES"]


def _torch(sample: Sample) -> Call | None:
    a, b, ends = sample.args
    plain = a.dtype == sample.kwargs.get("out_dtype") == torch.bfloat16 and sample.kwargs.get("c") is None
    return (lambda: torch._grouped_mm(a, b, offs=ends)) if plain else None


def _loop(sample: Sample) -> Call | None:
    a, b, ends = sample.args
    out_dtype, c = sample.kwargs.get("out_dtype") or torch.float32, sample.kwargs.get("c")
    if a.dtype != torch.bfloat16:
        return None
    depths = slices(ends)
    options: dict[str, Any] = {} if out_dtype == a.dtype else {"out_dtype": out_dtype}

    def call() -> torch.Tensor:
        d = torch.empty(len(depths), a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
        for g, depth in enumerate(depths):
            if c is None:
                torch.mm(a[:, depth], b[depth], out=d[g], **options)
            else:
                torch.addmm(c[g], a[:, depth], b[depth], out=d[g], **options)
        return d

    return call


PEERS = (GpuPeer("torch_grouped", None, _torch), GpuPeer("cublas_loop", None, _loop))
