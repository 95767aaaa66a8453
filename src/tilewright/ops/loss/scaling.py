"""A gradient that a forward has computed, times the gradient of the loss, known only in the backward."""

import torch
from torch import Tensor

from tilewright.ops.loss.cross_entropy_ import SCALE


def scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """gradient * dloss.  Nothing is read or written where dloss is 1, which the device finds out; else the product
    takes the place of `gradient`, unless the graph is kept and needs it again.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * dloss
    SCALE(gradient, dloss.detach(), "auto", "default")
    return gradient
