"""Other argmaxes of rows: torch's, and FlashInfer's top-k with k of 1."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call:
    (logits,) = sample.args
    return lambda: torch.argmax(logits, -1)


def _flashinfer(sample: Sample) -> Call:
    from flashinfer import top_k

    (logits,) = sample.args
    return lambda: top_k(logits, 1, tie_break=1)[1][:, 0]


PEERS = (LibraryPeer("torch_argmax", None, _torch), LibraryPeer("flashinfer", "flashinfer", _flashinfer))
