"""cuBLAS of the same scaling into float32, then activation and cast by torch.compile: two kernels instead of one.

Through bf16 it would be faster, and its scales those of rounded numbers.
"""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer, eager
from tilewright.ops.gemm.peers.scaled_matmul import PEERS as PRODUCTS
from tilewright.ops.peer import Call
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast

REPLACES = {"cuda": ("eager", "compile")}


def _then_cast(sample: Sample) -> Call | None:
    activation = sample.kwargs.get("activation")
    (cublas,) = (peer for peer in PRODUCTS if peer.name == "cublas_block")
    product = cublas.make(Sample(sample.args, {"bias": sample.kwargs.get("bias"), "out_dtype": torch.float32}))
    if product is None:
        return None
    finish = torch.compile(lambda z: cast(eager(z, None, activation), TOKEN), fullgraph=True, dynamic=False)
    return lambda: finish(product())


PEERS = (GpuPeer("cublas_block_then_cast", None, _then_cast),)
