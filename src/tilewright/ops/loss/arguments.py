"""The arguments of cross entropy of logits, and their checks."""

from typing import NamedTuple

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy
from tilewright.ops.loss.entropy import Options

KERNELS = (
    "triton.cross_entropy",
    "sm90.cross_entropy_in_place",
    "triton.cross_entropy_in_place",
    "triton.scale_gradient",
)
"""The kernels of all raw ops of `cross_entropy`."""


class CrossEntropyArgs(NamedTuple):
    logits: Tensor  # (M, V)
    target: Tensor  # (M,)
    weight: Tensor | None  # (V,)
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: str


def raw_arguments(
    op: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> CrossEntropyArgs:
    """The arguments of the raw op: rows of logits."""
    if isinstance(logits, Tensor) and isinstance(target, Tensor) and logits.dim() not in (0, 2):
        if target.shape != logits.shape[:-1]:
            raise InputError(f"{op}: target is {tuple(target.shape)}; needs {tuple(logits.shape[:-1])}, as logits.")
        logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    cap = entropy.as_softcap(op, softcap)
    return CrossEntropyArgs(logits, target, weight, ignore_index, label_smoothing, z_loss, cap, reduction)


def check_arguments(op: str, args: CrossEntropyArgs) -> None:
    """The checks of a form of cross entropy of logits."""
    rows.check_floating(op, logits=args.logits)
    if args.logits.dim() != 2 or args.logits.shape[1] == 0:
        raise InputError(f"{op}: logits is {tuple(args.logits.shape)}; needs (..., V) with one class or more.")
    classes, device = args.logits.shape[1], args.logits.device
    entropy.check_options(op, Options(*args[3:8]))
    entropy.check_targets(op, args.target, tuple(args.logits.shape[:1]), device)
    entropy.check_weight(op, args.weight, classes, device)
    entropy.check_range(op, args.target, classes, args.ignore_index)
