"""Other top-k of rows: torch's, whose order of equals is open, and FlashInfer's."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call:
    x, k = sample.args
    return lambda: tuple(torch.topk(x, k, dim=-1))


def _flashinfer(sample: Sample) -> Call:
    from flashinfer import top_k

    x, k = sample.args
    return lambda: tuple(top_k(x, k, sorted=True, tie_break=1))


PEERS = (LibraryPeer("torch_topk", None, _torch), LibraryPeer("flashinfer", "flashinfer", _flashinfer))
