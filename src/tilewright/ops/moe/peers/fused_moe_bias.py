"""Experts of gpt-oss by torch's grouped products, the steps of transformers' "grouped_mm"."""

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.moe.fused_bias.reference import gated
from tilewright.ops.peer import Call


def _grouped(sample: Sample) -> Call | None:
    x, w1, w2, weights, ids = sample.args
    options = sample.kwargs
    biases = options.get("w1_bias"), options.get("w2_bias")
    if options.get("expert_map") is not None or bool((ids < 0).any()) or x.dtype != torch.bfloat16 or None in biases:
        return None
    b1, b2 = biases
    assert b1 is not None and b2 is not None  # noqa: PT018 - for mypy
    k, experts = ids.shape[1], w1.shape[0]
    form = options.get("activation", "swigluoai"), options.get("interleaved", False)
    numbers = options.get("alpha", 1.702), options.get("limit", 7.0)

    def call() -> Tensor:
        by_expert, order = ids.flatten().sort()
        ends = torch.histc(by_expert.int(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
        hidden = gated(torch._grouped_mm(x[order // k], w1.mT, offs=ends).add_(b1[by_expert]), *form, *numbers)
        y = torch._grouped_mm(hidden, w2.mT, offs=ends).add_(b2[by_expert])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=x.device)
        return (y[inverse].view(-1, k, x.shape[1]) * weights[..., None]).sum(1).to(x.dtype)

    return call


PEERS = (GpuPeer("torch_grouped", None, _grouped),)
