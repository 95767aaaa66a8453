"""Other libraries' rotary embedding, for the bench."""

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

from tilewright.dispatch import Sample


class Liger:
    """liger_kernel's Triton kernel; it turns q and k where they lie, so a call consumes its inputs.

    It knows half-split pairs and one row of the tables a token.  Where a gradient is wanted, q and k are leaves, which
    autograd lets nobody overwrite: the forward, which is not timed then, gets copies.
    """

    name = "liger"

    def available(self) -> bool:
        return find_spec("liger_kernel") is not None

    def make(self, sample: Sample) -> Callable[[], tuple[Tensor, Tensor]] | None:
        from liger_kernel.ops.rope import LigerRopeFunction

        q, k, cos, sin = sample.args
        if sample.kwargs or q.dim() != 4 or cos.shape[-1] != q.shape[-1]:
            return None  # in place, partial rotation leaves the rest where it is: less work than the op's
        if q.requires_grad or k.requires_grad:
            return lambda: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)
        return lambda: LigerRopeFunction.apply(q, k, cos, sin)


PEERS = (Liger(),)
