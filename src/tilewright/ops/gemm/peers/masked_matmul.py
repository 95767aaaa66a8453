"""cuBLAS's batched product, which multiplies every row, and DeepGEMM."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.groups import REPLACES, deep_gemm_rows, plain
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.peer import Call

__all__ = ["PEERS", "REPLACES"]


def _bmm(sample: Sample) -> Call | None:
    a, b, _ = sample.args
    return (lambda: torch.bmm(a, b)) if plain(sample) else None


def _deep_gemm(sample: Sample) -> Call | None:
    a, b, rows = sample.args
    return deep_gemm_rows(sample, "m_grouped_{}_gemm_nt_masked", (*a.shape[:2], b.shape[2]), rows, a.shape[1])


PEERS = (GpuPeer("bmm", None, _bmm), GpuPeer("deep_gemm", "deep_gemm", _deep_gemm))
