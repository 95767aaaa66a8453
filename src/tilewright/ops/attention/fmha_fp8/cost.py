"""What an `fmha_fp8` must compute and move: products of the pairs that its mask allows."""

import torch

from tilewright.dispatch import Cost, Sample
from tilewright.ops import rows
from tilewright.ops.attention.fmha.cost import pairs
from tilewright.ops.attention.fmha_fp8.args import merged


def cost(sample: Sample, direction: str) -> Cost:
    """Two products, QK^T and PV, of float8; reads q, k, v and their scales, writes o and lse."""
    bshd = sample.kwargs.get("layout") == "BSHD"
    q, k, v = (t.transpose(1, 2) if bshd else t for t in sample.args[:3])
    d, d_v = q.shape[3], v.shape[3]
    options = sample.kwargs
    count = pairs(q, k, merged(options.get("mask"), bool(options.get("causal")), options.get("window")))
    out_dtype = options.get("out_dtype") or torch.bfloat16
    written = q.numel() // d * (d_v * out_dtype.itemsize + 4)
    return Cost(2 * count * (d + d_v), rows.nbytes(*sample.args), written)
