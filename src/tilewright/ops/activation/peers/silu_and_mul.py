"""Other packed SwiGLUs: Liger's, in versions that have it."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops import swiglu

    packed = getattr(swiglu, "LigerFusedGateUpSiLUMulFunction", None)
    if packed is None:
        return None
    (x,) = sample.args
    return lambda: packed.apply(x)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
