"""Other GeGLUs: Liger's, which has the tanh form only."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    gate, up = sample.args
    if sample.kwargs.get("approximate", "tanh") != "tanh":
        return None
    return lambda: LigerGELUMulFunction.apply(gate, up)  # its backward overwrites gate and up


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
