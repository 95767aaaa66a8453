"""Other sparsemaxes: Liger's, which sorts in torch."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.sparsemax import LigerSparsemaxFunction

    (x,) = sample.args
    if sample.kwargs.get("dim", -1) != -1:
        return None
    return lambda: LigerSparsemaxFunction.apply(x, -1)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
