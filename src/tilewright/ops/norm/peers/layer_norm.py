"""Other layer norms: Liger's. torch's fused one is the reference, so the peer "eager"."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    x, weight, bias = (*sample.args, None, None)[:3]
    if weight is None or bias is None:
        return None
    return lambda: LigerLayerNormFunction.apply(x, weight, bias, sample.kwargs.get("eps", 1e-5))


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
