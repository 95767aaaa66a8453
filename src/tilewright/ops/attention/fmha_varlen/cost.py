"""What attention over packed sequences must compute and move: the pairs of each sequence that its band allows."""

import torch
from torch import Tensor

from tilewright.dispatch import Cost, Sample
from tilewright.mask import Mask
from tilewright.ops import rows
from tilewright.ops.attention.fmha.cost import pairs
from tilewright.ops.attention.fmha_varlen.reference import band, spans


def cost(sample: Sample, direction: str) -> Cost:
    """Products and tensors as `fmha` counts them, tokens after the last sequence too."""
    q, k, v = sample.args[:3]
    options = sample.kwargs
    cu_q = options["cu_seqlens_q"]
    cu_k = options.get("cu_seqlens_k", cu_q)
    d, d_v = q.shape[2], v.shape[2]
    count = allowed(q, k, cu_q, cu_k, band(bool(options.get("causal")), options.get("window")))
    output_bytes = q.shape[0] * q.shape[1] * (d_v * q.element_size() + 4)
    inputs = rows.nbytes(q, k, v)
    if direction == "fwd":
        return Cost(2 * count * (d + d_v), inputs, output_bytes)
    read = inputs + output_bytes + q.shape[0] * q.shape[1] * d_v * q.element_size()
    return Cost(2 * count * (3 * d + 2 * d_v), read, inputs)


def allowed(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, mask: Mask | None) -> int:
    """How many (query, key) pairs there are, over heads.  q: (T_q, H, D)   k: (T_k, H_kv, D)"""
    sizes = (torch.empty((1, t.shape[1], t.shape[0], t.shape[2]), device="meta") for t in (q, k))
    of_q, of_k = sizes
    return sum(pairs(of_q[:, :, i], of_k[:, :, j], mask) for i, j in spans(cu_q, cu_k))
