"""Experts by torch's grouped products, the steps of transformers' "grouped_mm", and by a batch of gathered weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.peer import Call

MOST_WEIGHTS = 1 << 32  # elements that the batch may gather


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _summed(rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of (T, k, H) over k."""
    return (rows * weights[..., None]).sum(1).to(rows.dtype)


def _plain(sample: Sample) -> bool:
    """Whether every slot has an expert of this device, with SiLU."""
    is_local = sample.kwargs.get("expert_map") is None and not bool((sample.args[4] < 0).any())
    return is_local and sample.kwargs.get("activation", "silu") == "silu"


def _grouped(sample: Sample) -> Call | None:
    x, w1, w2, weights, ids = sample.args
    if not _plain(sample) or x.dtype != torch.bfloat16:
        return None
    k, experts = ids.shape[1], w1.shape[0]

    def call() -> Tensor:
        by_expert, order = ids.flatten().sort()
        ends = torch.histc(by_expert.int(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
        hidden = _gated(torch._grouped_mm(x[order // k], w1.mT, offs=ends))
        y = torch._grouped_mm(hidden, w2.mT, offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=x.device)
        return _summed(y[inverse].view(-1, k, x.shape[1]), weights)

    return call


def _batched(sample: Sample) -> Call | None:
    x, w1, w2, weights, ids = sample.args
    if not _plain(sample) or ids.numel() * w1[0].numel() > MOST_WEIGHTS:
        return None
    k = ids.shape[1]

    def call() -> Tensor:
        chosen, rows = ids.flatten(), x.repeat_interleave(k, dim=0)
        hidden = _gated(torch.bmm(w1[chosen], rows[..., None])[..., 0])
        return _summed(torch.bmm(w2[chosen], hidden[..., None])[..., 0].view(-1, k, x.shape[1]), weights)

    return call


PEERS = (
    GpuPeer("torch_grouped", None, _grouped),
    GpuPeer("torch_batched", None, _batched),
)
