"""What an `mla` must compute and move: products of the pairs that its mask allows."""

from tilewright.dispatch import Cost, Sample
from tilewright.ops import rows
from tilewright.ops.attention.arguments import merged
from tilewright.ops.attention.fmha.cost import pairs


def cost(sample: Sample, direction: str) -> Cost:
    """Forward: products over D + D_pe, then over D_v; reads the five tensors, writes o and lse.  Backward: three over
    D + D_pe and two over D_v, as fmha's; reads these tensors and do, writes five gradients.
    """
    bshd = sample.kwargs.get("layout") == "BSHD"
    tensors = [t.transpose(1, 2) if bshd else t for t in sample.args]
    q, q_pe, k, _, v = tensors
    d, d_v = q.shape[3] + q_pe.shape[3], v.shape[3]
    count = pairs(q, k, merged("mla", sample.kwargs.get("mask"), bool(sample.kwargs.get("causal", True))))
    per_row = q.numel() // q.shape[3]
    output_bytes = per_row * (d_v * q.element_size() + 4)
    inputs = rows.nbytes(*tensors)
    if direction == "fwd":
        return Cost(2 * count * (d + d_v), inputs, output_bytes)
    return Cost(2 * count * (3 * d + 2 * d_v), inputs + output_bytes + per_row * d_v * q.element_size(), inputs)
