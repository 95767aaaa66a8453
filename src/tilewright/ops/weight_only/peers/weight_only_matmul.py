"""Other products by quantised weights: torch's int4 kernel, and as a yardstick cuBLAS on the weight in 16 bits.

The reference dequantises to float32, which no model does: neither it nor torch.compile of it is a peer on a GPU.
`torch._weight_int8pack_mm` knows one scale a row, which is another problem.
"""

import torch
import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer, eager
from tilewright.ops.peer import Call
from tilewright.ops.weight_only import packing

REPLACES = {"cuda": ("eager", "compile")}

_INNER_TILES = 8  # of 16 along K: torch's packing for the widest loads


def _int4pack(sample: Sample) -> Call | None:
    """tinygemm as torch has it: bf16, (u - 8) * scale + zero with u from 0 to 15, the even element in the high bits.

    It rounds the weight to bf16.
    """
    x, q, scales = sample.args
    n, k = q.shape[0], packing.depth_of(q)
    plain = not any(sample.kwargs.get(name) is not None for name in ("bias", "activation", "out_dtype"))
    fits = x.dtype == torch.bfloat16 and packing.bits_of(q) == 4 and n % 8 == 0 and k % (16 * _INNER_TILES) == 0
    if not (plain and fits):
        return None
    unsigned = (packing.unpack(q) + 8).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(unsigned[:, 0::2] << 4 | unsigned[:, 1::2], _INNER_TILES)
    both = torch.stack((scales.T, torch.zeros_like(scales.T)), -1).to(torch.bfloat16).contiguous()  # (groups, N, 2)
    return lambda: torch._weight_int4pack_mm(x, packed, packing.GROUP, both)


def _cublas(sample: Sample) -> Call | None:
    """cuBLAS with 16-bit weights, which reads two to four times the bytes."""
    x, q, scales = sample.args
    if sample.kwargs.get("out_dtype") not in (None, x.dtype):
        return None
    w = packing.restore(q, scales).to(x.dtype)
    bias, activation = sample.kwargs.get("bias"), sample.kwargs.get("activation")
    return lambda: eager(F.linear(x, w, bias), None, activation)


PEERS = (GpuPeer("torch_int4pack", None, _int4pack), GpuPeer("cublas_16bit", None, _cublas))
