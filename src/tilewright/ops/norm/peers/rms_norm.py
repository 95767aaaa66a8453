"""Other RMSNorms: torch's fused one and Liger's."""

import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call | None:
    x, weight = sample.args
    if sample.kwargs.get("offset", 0.0) != 0.0 or (weight is not None and weight.dtype != x.dtype):
        return None
    eps = sample.kwargs.get("eps", 1e-6)
    return lambda: F.rms_norm(x, x.shape[-1:], weight, eps)


def _liger(sample: Sample) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight = sample.args
    options = sample.kwargs
    offset = options.get("offset", 0.0)
    casting = "gemma" if offset or options.get("fp32_weight") else "llama"
    eps = options.get("eps", 1e-6)
    return lambda: LigerRMSNormFunction.apply(x, weight, eps, offset, casting)  # its backward writes dX over dY


PEERS = (LibraryPeer("torch_fused", None, _torch), LibraryPeer("liger", "liger_kernel", _liger))
