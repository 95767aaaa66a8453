"""The same experts in bf16, restored before: our own `fused_moe`, and the steps of transformers' "grouped_mm"."""

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.peers.matmul import GpuPeer
from tilewright.ops.moe import fused_moe
from tilewright.ops.moe.peers.fused_moe import PEERS as EXPERTS
from tilewright.ops.peer import Call
from tilewright.ops.quant.layout import BLOCK
from tilewright.ops.quant.numbers import restore

MOST_WEIGHTS = 1 << 33  # elements of both, beside which the checks need room


def _bf16(sample: Sample) -> Sample | None:
    """The experts with restored weights, one expert at a time, so that float32 is short."""
    x, w1, w2, w1_scale, w2_scale, weights, ids = sample.args
    if x.dtype != torch.bfloat16 or w1.numel() + w2.numel() > MOST_WEIGHTS:
        return None

    def restored(q: Tensor, scales: Tensor) -> Tensor:
        return torch.stack([restore(e, s, BLOCK, torch.bfloat16) for e, s in zip(q, scales, strict=True)])

    return Sample((x, restored(w1, w1_scale), restored(w2, w2_scale), weights, ids), sample.kwargs)


def _ours(sample: Sample) -> Call | None:
    plain = _bf16(sample)
    return None if plain is None else lambda: fused_moe.fused_moe(*plain.args, **plain.kwargs)


def _grouped(sample: Sample) -> Call | None:
    plain = _bf16(sample)
    (grouped,) = (peer for peer in EXPERTS if peer.name == "torch_grouped")
    return None if plain is None else grouped.make(plain)


PEERS = (GpuPeer("tilewright_bf16", None, _ours), GpuPeer("torch_grouped_bf16", None, _grouped))
