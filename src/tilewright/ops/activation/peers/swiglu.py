"""Other SwiGLUs: Liger's, of the plain form."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if sample.kwargs:
        return None
    gate, up = sample.args
    return lambda: LigerSiLUMulFunction.apply(gate, up)  # its backward writes the gradients over gate and up


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
