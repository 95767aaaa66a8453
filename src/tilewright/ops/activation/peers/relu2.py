"""Other squared ReLUs: Liger's, without a gate."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.transformers.relu_squared import LigerReLUSquared

    if len(sample.args) == 2:
        return None
    module = LigerReLUSquared()
    return lambda: module(*sample.args)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
