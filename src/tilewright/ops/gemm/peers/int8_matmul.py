"""Another product of the same values, as a yardstick: cuBLAS on both operands in 16 bits.

The reference is `torch._int_mm`, the int8 product of cuBLASLt, and torch's own ops for the scales.  The same problem in
torch is "eager", and "compile", which makes one launch of these ops.
"""

import torch
import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer, eager
from tilewright.ops.peer import Call


def _cublas(sample: Sample) -> Call | None:
    a, b, scale_a, scale_b = sample.args
    dtype = sample.kwargs.get("out_dtype") or torch.bfloat16
    x, w = ((q * scales).to(dtype) for q, scales in ((a, scale_a), (b, scale_b)))
    bias, activation = sample.kwargs.get("bias"), sample.kwargs.get("activation")
    return lambda: eager(F.linear(x, w, bias), None, activation)


PEERS = (GpuPeer("cublas_16bit", None, _cublas),)
