"""Other rotary embeddings: Liger's."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    """Liger rotates q and k in place, so a call consumes its inputs; half-split pairs, one row of the tables a token.

    If q or k requires a gradient they are leaves, which autograd does not allow to overwrite: the forward, which is not
    timed then, gets copies.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    q, k, cos, sin = sample.args
    if sample.kwargs or q.dim() != 4 or cos.shape[-1] != q.shape[-1]:
        return None  # in place, a partial rotation copies no rest: less work than the op
    if q.requires_grad or k.requires_grad:
        return lambda: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)
    return lambda: LigerRopeFunction.apply(q, k, cos, sin)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
