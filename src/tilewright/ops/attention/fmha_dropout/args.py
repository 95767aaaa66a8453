"""Arguments of the raw ops of `fmha_dropout`: those of `fmha`, and what is dropped."""

from typing import NamedTuple

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import philox
from tilewright.ops.attention import checks
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs, MaskArgs
from tilewright.ops.attention.dropped import Dropout

OP = "fmha_dropout"


class FmhaDropoutArgs(NamedTuple):
    """Arguments of the forward."""

    q: Tensor  # (B, H, S_q, D), unit last stride, as k and v
    k: Tensor  # (B, H_kv, S_k, D)
    v: Tensor  # (B, H_kv, S_k, D_v)
    sinks: Tensor | None  # (H,) float32
    slopes: Tensor | None  # (H,) float32, of ALiBi
    seed: Tensor  # () int64
    offset: Tensor | None  # () int64, None: 0
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    p: float

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)

    @property
    def fmha(self) -> FmhaArgs:
        """Those of `fmha`."""
        operands = self.q, self.k, self.v, self.sinks, self.slopes
        return FmhaArgs(*operands, *self.mask, self.scale, self.softcap)

    @property
    def dropout(self) -> Dropout:
        """What is dropped."""
        return Dropout(self.seed, self.offset, self.p)


class FmhaDropoutBackwardArgs(NamedTuple):
    """Arguments of the backward: the gradients of both results, then the forward's tensors and results."""

    do: Tensor  # (B, H, S_q, D_v)
    dlse: Tensor | None  # (B, H, S_q) float32
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor  # (B, H, S_q, D_v)
    lse: Tensor  # (B, H, S_q) float32
    sinks: Tensor | None
    slopes: Tensor | None
    seed: Tensor
    offset: Tensor | None
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float
    softcap: float
    p: float

    @property
    def fmha(self) -> FmhaBackwardArgs:
        """Those of `fmha`."""
        results = self.do, self.dlse, self.q, self.k, self.v, self.o, self.lse, self.sinks, self.slopes
        mask = self.mask_data, self.program, self.left, self.right
        return FmhaBackwardArgs(*results, *mask, self.scale, self.softcap)

    @property
    def dropout(self) -> Dropout:
        """What is dropped."""
        return Dropout(self.seed, self.offset, self.p)


def check(args: FmhaDropoutArgs) -> None:
    """Raises InputError for raw arguments that cannot run."""
    checks.check_raw(OP, args.fmha)
    philox.check_seeds(OP, args.q, args.seed, args.offset)
    if not 0.0 <= args.p <= 1.0:
        raise InputError(f"{OP}: p is {args.p}; needs a number 0 to 1.")
