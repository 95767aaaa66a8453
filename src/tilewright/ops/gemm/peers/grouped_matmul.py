"""torch's grouped product, a loop over cuBLAS that knows the sizes beforehand, and DeepGEMM."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.groups import REPLACES, deep_gemm_rows, plain, slices
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.peer import Call

__all__ = ["PEERS", "REPLACES"]


def _torch(sample: Sample) -> Call | None:
    a, b, ends = sample.args
    return (lambda: torch._grouped_mm(a, b, offs=ends)) if plain(sample) else None


def _loop(sample: Sample) -> Call | None:
    a, b, ends = sample.args
    if not plain(sample):
        return None
    rows = slices(ends)

    def call() -> torch.Tensor:
        d = torch.empty(a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
        for g, group in enumerate(rows):
            torch.mm(a[group], b[g], out=d[group])
        return d

    return call


def _deep_gemm(sample: Sample) -> Call | None:
    a, b, ends = sample.args
    rows = slices(ends)
    if any((group.stop - group.start) % 128 for group in rows):
        return None
    ids = torch.cat([torch.full((group.stop - group.start,), g, dtype=torch.int32) for g, group in enumerate(rows)])
    return deep_gemm_rows(sample, "m_grouped_{}_gemm_nt_contiguous", (a.shape[0], b.shape[2]), ids.to(a.device))


PEERS = (
    GpuPeer("torch_grouped", None, _torch),
    GpuPeer("cublas_loop", None, _loop),
    GpuPeer("deep_gemm", "deep_gemm", _deep_gemm),
)
