"""A gradient that a forward has computed, times the gradient of the loss, known only in the backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.ops import rows


class ScaleArgs(NamedTuple):
    gradient: Tensor  # (M, N), written
    scale: Tensor  # ()


def _reference(args: ScaleArgs) -> None:
    args.gradient.mul_(args.scale)


SCALE = RawOp(
    "cross_entropy_",
    "bwd",
    ScaleArgs,
    package="tilewright.ops.loss",
    kernels=("triton.cross_entropy_in_place", "triton.scale_gradient"),
    outputs=lambda args: (),
    reference=_reference,
    bucket=lambda args: rows.rows_bucket(args.gradient),
    bucket_names=rows.RowsBucket._fields,
    count=0,
    mutates=("gradient",),
)


def scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """gradient * dloss.  Nothing is read or written where dloss is 1, which the device finds out; else the product
    takes the place of `gradient`, unless the graph is kept and needs it again.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * dloss
    SCALE(gradient, dloss.detach(), "auto", "default")
    return gradient
