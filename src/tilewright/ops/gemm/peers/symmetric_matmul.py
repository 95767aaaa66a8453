"""Other symmetric products: cuBLAS, as torch calls it, on all of the product; its triangles may differ slightly."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import REPLACES, GpuPeer
from tilewright.ops.peer import Call

__all__ = ["PEERS", "REPLACES"]


def _cublas(sample: Sample) -> Call:
    a, b, options = sample.args[0], sample.args[-1].mT, sample.kwargs
    c, alpha, beta = options.get("c"), options.get("alpha", 1.0), options.get("beta", 1.0)
    if c is None:
        return (lambda: torch.bmm(a, b)) if alpha == 1.0 else (lambda: alpha * torch.bmm(a, b))
    return lambda: torch.baddbmm(c, a, b, alpha=alpha, beta=beta)


PEERS = (GpuPeer("cublas", None, _cublas),)
