"""transformers' forms of experts: its grouped products by torch, and a batch of products with gathered weights."""

import torch
from torch import Tensor, nn

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.peer import Call

MOST_WEIGHTS = 1 << 32  # elements that the batch may gather


class _Experts(nn.Module):
    """What transformers' functions read of a module of experts."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.num_experts = w1, w2, w1.shape[0]

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _module(sample: Sample) -> _Experts | None:
    """None where theirs is another function: another gate, experts that are elsewhere, dropped slots."""
    w1, w2, _, ids = sample.args[1:]
    plain = sample.kwargs.get("expert_map") is None and sample.kwargs.get("activation", "silu") == "silu"
    return _Experts(w1, w2) if plain and not bool((ids < 0).any()) else None


def _grouped(sample: Sample) -> Call | None:
    from transformers.integrations.moe import grouped_mm_experts_forward

    module, (x, _, _, weights, ids) = _module(sample), sample.args
    return None if module is None else lambda: grouped_mm_experts_forward(module, x, ids, weights)


def _batched(sample: Sample) -> Call | None:
    from transformers.integrations.moe import batched_mm_experts_forward

    module, (x, w1, _, weights, ids) = _module(sample), sample.args
    if module is None or ids.numel() * w1[0].numel() > MOST_WEIGHTS:
        return None
    return lambda: batched_mm_experts_forward(module, x, ids, weights)


PEERS = (
    GpuPeer("hf_grouped_mm", "transformers", _grouped),
    GpuPeer("hf_batched_mm", "transformers", _batched),
)
