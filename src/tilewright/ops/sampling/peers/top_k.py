"""Other top-k of rows: FlashInfer's, and torch's, which leaves the order of equals open: in float32 alone, where random
rows have few.
"""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call | None:
    x, k = sample.args
    return (lambda: tuple(torch.topk(x, k, dim=-1))) if x.dtype == torch.float32 else None


def _flashinfer(sample: Sample) -> Call:
    from flashinfer import top_k

    x, k = sample.args
    return lambda: tuple(top_k(x, k, sorted=True, tie_break=1))


PEERS = (LibraryPeer("torch_topk", None, _torch), LibraryPeer("flashinfer", "flashinfer", _flashinfer))
