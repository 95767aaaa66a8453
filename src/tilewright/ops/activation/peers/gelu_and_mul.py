"""Other packed GeGLUs: Liger's for two tensors, on the halves of one, which it copies first."""

from tilewright.dispatch import Sample
from tilewright.ops.activation.gated import halves
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if sample.kwargs.get("approximate", "tanh") != "tanh":
        return None
    (x,) = sample.args
    return lambda: LigerGELUMulFunction.apply(*halves(x))


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
