"""Other packed SwiGLUs: Liger's, in the versions that have one."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops import swiglu

    function = getattr(swiglu, "LigerFusedGateUpSiLUMulFunction", None)
    (x,) = sample.args
    return None if function is None else lambda: function.apply(x, False)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
