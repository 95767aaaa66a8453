"""Other group norms: torch's fused one, and Liger's, which needs weight and bias."""

import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call:
    x, groups, weight, bias = sample.args
    eps = sample.kwargs.get("eps", 1e-5)
    return lambda: F.group_norm(x, groups, weight, bias, eps)


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    x, groups, weight, bias = sample.args
    if weight is None or bias is None or x.dim() < 3:
        return None
    eps = sample.kwargs.get("eps", 1e-5)
    return lambda: LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], groups, eps)


PEERS = (LibraryPeer("torch_fused", None, _torch), LibraryPeer("liger", "liger_kernel", _liger))
