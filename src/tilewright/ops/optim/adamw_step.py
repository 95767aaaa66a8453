"""What `adamw` and `adamw_8bit` share: options as the raw ops take them, and the step of the parameter."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError


def numbers_of(op: str, param: Any, lr: Tensor | float, betas: Any) -> tuple[Tensor | None, tuple[float, float, float]]:
    """The learning rate as a tensor, or None; then lr (0 beside a tensor), beta1, beta2.

    Raises InputError for betas that are no pair, and for a param that is no tensor.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InputError(f"{op}: betas is {betas!r}; needs two numbers in [0, 1).")
    if not isinstance(param, Tensor):
        raise InputError(f"{op}: param is a {type(param).__name__}; needs a torch.Tensor.")
    beta1, beta2 = betas
    return (lr, (0.0, beta1, beta2)) if isinstance(lr, Tensor) else (None, (lr, beta1, beta2))


def stepped_weight(args: Any, m: Tensor, v: Tensor) -> Tensor:
    """args.param after a step with the new averages m and v, in their dtype.   args: those of either raw op."""
    weight, kind = args.param.to(m.dtype), m.dtype
    step = args.step.view(()).to(torch.float64)
    correction1, correction2 = ((1 - beta**step).to(kind) for beta in (args.beta1, args.beta2))
    lr = weight.new_full((), args.lr) if args.rate is None else args.rate.to(kind).view(())
    weight = weight - lr * args.weight_decay * weight
    return weight - lr / correction1 * m / (v.sqrt() / correction2.sqrt() + args.eps)
