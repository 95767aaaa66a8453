"""Other GeGLUs: Liger's, which has the tanh form only."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if sample.kwargs.get("approximate", "tanh") != "tanh":
        return None
    gate, up = sample.args
    return lambda: LigerGELUMulFunction.apply(gate, up)  # its backward writes the gradients over gate and up


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
