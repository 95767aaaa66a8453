"""Other fused residual norms: Liger's; and torch's addition with its fused RMSNorm."""

import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call | None:
    x, residual, weight = sample.args
    if sample.kwargs.get("offset", 0.0) != 0.0 or (weight is not None and weight.dtype != x.dtype):
        return None
    eps = sample.kwargs.get("eps", 1e-6)

    def call() -> object:
        total = x + residual
        return F.rms_norm(total, x.shape[-1:], weight, eps), total

    return call


def _liger(sample: Sample) -> Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    x, residual, weight = sample.args
    options = sample.kwargs
    offset = options.get("offset", 0.0)
    casting = "gemma" if offset or options.get("fp32_weight") else "llama"
    eps = options.get("eps", 1e-6)
    return lambda: LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting, False)


PEERS = (LibraryPeer("torch_fused", None, _torch), LibraryPeer("liger", "liger_kernel", _liger))
