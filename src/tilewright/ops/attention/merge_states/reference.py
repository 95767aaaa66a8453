"""`merge_states` in plain torch, from the raw arguments."""

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import vjp
from tilewright.ops.attention.layout import laid_like
from tilewright.ops.attention.merge_states.args import MergeStatesArgs, MergeStatesBackwardArgs
from tilewright.ops.rows import accumulate_dtype


def merge(args: MergeStatesArgs) -> tuple[Tensor, Tensor]:
    """(o', lse') in plain torch, differentiable; without NaN where no state saw a key, forwards and backwards."""
    o = args.o
    stacks = (o,) if args.other is None else (o, args.other)
    logs = args.lse if args.other_lse is None else torch.cat((args.lse, args.other_lse))
    lse_max = logs.detach().amax(0)
    lse_max = torch.where(lse_max == -torch.inf, 0.0, lse_max)
    weights = torch.exp(logs - lse_max)
    l_i = weights.sum(0)
    any_visible = l_i != 0
    divisor = torch.where(any_visible, l_i, 1.0)
    merged = torch.where(any_visible, lse_max + torch.log(divisor), -torch.inf)
    probabilities, empty = (weights / divisor).unsqueeze(-1), (logs == -torch.inf).unsqueeze(-1)
    acc, start = None, 0
    for stack in stacks:
        part = slice(start, start + stack.shape[0])
        added = (torch.where(empty[part], 0.0, stack.to(accumulate_dtype(stack.dtype))) * probabilities[part]).sum(0)
        acc, start = added if acc is None else acc + added, part.stop
    assert acc is not None
    return laid_like(acc.to(args.out_dtype), o[0]), merged


def merge_backward(args: MergeStatesBackwardArgs) -> tuple[Tensor, ...]:
    """Gradients of both stacks and their lse; those of a second stack are empty where there is none."""
    o, lse, other, other_lse, out_dtype = args.forward
    grads = (args.do, args.dlse)
    if other is None or other_lse is None:
        gradients = vjp(lambda a, b: merge(MergeStatesArgs(a, b, None, None, out_dtype)), (o, lse), grads)
        return (*gradients, o.new_empty(0), lse.new_empty(0))
    states = (o, lse, other, other_lse)
    return vjp(lambda a, b, c, d: merge(MergeStatesArgs(a, b, c, d, out_dtype)), states, grads)
