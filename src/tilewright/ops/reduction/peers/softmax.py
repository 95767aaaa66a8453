"""Other softmaxes: Liger's.  torch's own is the reference, so the peer "eager"."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    (x,) = sample.args
    if sample.kwargs.get("dim", -1) != -1:
        return None
    return lambda: LigerSoftmaxFunction.apply(x)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
