"""Muon: momentum whose singular values are made about 1, for the matrices of hidden layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import bmm, symmetric_matmul
from tilewright.optim.gradients import with_gradients

_BATCH = 1 << 28  # elements of the matrices that are made orthogonal at once: 512 MiB a temporary
_FIRST, _NEXT = 3, 2  # iterations that multiply X once; of more, roundings of A grow until they are its small values


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, whose products are those of batches of matrices.

    B = B + (1 - momentum) (G - B);  O = the orthogonal factor of B, or of G + momentum (B - G) with `nesterov`;
    W = (1 - lr weight_decay) W - lr r O.

    params:   matrices (M, N) bf16|fp16|fp32, or groups of them; AdamW is for vectors, embeddings and the last layer.
    adjust_lr_fn: r is sqrt(max(1, M / N)) for "original" (None), Keller Jordan's; 0.2 sqrt(max(M, N)) for
              "match_rms_adamw", Moonshot's, with which lr and weight_decay of AdamW may stay.
    ns_coefficients (a, b, c), ns_steps, eps: O is ns_steps iterations X = a X + (b A + c A A) X with A = X X^T from
              X / max(norm, eps): quintic Newton-Schulz, which leaves singular values of about 0.7 to 1.2.
    lr:       a number, or a tensor of one, which is not read on the host.

    Matrices of equal shape and dtype are one batch, in bf16 with float32 sums.  Products that are symmetric are
    `ops.symmetric_matmul`, on half of their tiles; where N is at least 2 M the first three of four or more iterations
    multiply X once, and so do the next two.  The state, "momentum_buffer", is torch's.
    Raises InputError for parameters that are no matrices, sparse and sharded gradients; ValueError, as torch does, for
    numbers out of range.
    Source: Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025; Ahn et al., "Dion", 2025
    (symmetric products).
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; raises InputError for parameters that are no matrices."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() != 2:
                del self.param_groups[-1]
                raise InputError(
                    f"Muon: a parameter has shape {tuple(p.shape)}; needs matrices (M, N). Use AdamW for the others."
                )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient.  closure: computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = [with_gradients("Muon", group["params"]) for group in self.param_groups]
        for group, params in zip(self.param_groups, chosen, strict=True):
            for batch in _batches(params):
                self._step_batch(group, batch)
        return loss

    def _step_batch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """The step of matrices of one shape, dtype and device."""
        lr, momentum = group["lr"], group["momentum"]
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self._momentum_buffer(p) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        directions = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        x = torch.empty((len(params), *params[0].shape), dtype=torch.bfloat16, device=params[0].device)
        torch._foreach_copy_(list(x), directions)
        x, scale = orthogonal(x, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = _ratio(group["adjust_lr_fn"], params[0]) * scale
        if isinstance(lr, Tensor):
            lr = lr.to(x.device)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(params, list(x.to(torch.float32) * (lr * rate)))
        else:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, list(x), alpha=-lr * rate)

    def _momentum_buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonal(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> tuple[Tensor, float]:
    """About U V^T of each matrix U S V^T of x (B, M, N) bf16, which is overwritten, by Newton-Schulz iterations of the
    shorter side: a result in bf16 and the number that it is to be multiplied by.

    With P = (b / a) A + (c / a) A A an iteration is X = a (X + P X), whose factor a is left to that number.
    """
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x.div_(norm.clamp_(min=eps))
    scale, together = 1.0, _FIRST
    is_wide = x.shape[2] >= 2 * x.shape[1] and steps > _FIRST  # the last iteration evens out what the first ones round
    while steps > 0:
        count = min(together, steps) if is_wide else 1
        gram = symmetric_matmul(x, alpha=scale * scale)
        p = symmetric_matmul(gram, c=gram, alpha=c / a, beta=b / a)
        x = bmm(p, x, c=x) if count == 1 else bmm(_several(gram, p, coefficients, count), x)
        scale, steps, together = scale * a**count, steps - count, _NEXT
        if not 2.0**-16 < abs(scale) < 2.0**16:
            x, scale = x * scale, 1.0
    return (x.mT if tall else x), scale


def _several(gram: Tensor, p: Tensor, coefficients: Sequence[float], count: int) -> Tensor:
    """The factor of X of `count` iterations, the first of which has A = gram and P = p, without their factors a.

    A of the next iteration is a a (I + P) A (I + P).  All are polynomials of one A, so their products are symmetric.
    """
    a, b, c = coefficients
    factor = p.clone()
    factor.diagonal(dim1=1, dim2=2).add_(1.0)
    for _ in range(count - 1):
        half = symmetric_matmul(p, gram, c=gram)
        gram = symmetric_matmul(p, half, c=half, alpha=a * a, beta=a * a)
        p = symmetric_matmul(gram, c=gram, alpha=c / a, beta=b / a)
        factor = symmetric_matmul(p, factor, c=factor)
    return factor


def _batches(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of equal shape, dtype and device together, as many as a batch may have; size 0 has no step."""
    kinds: dict[Any, list[Tensor]] = {}
    for p in params:
        if p.numel():
            kinds.setdefault((p.shape, p.dtype, p.device), []).append(p)
    return [
        same[i : i + count]
        for same in kinds.values()
        for count in (max(1, _BATCH // same[0].numel()),)
        for i in range(0, len(same), count)
    ]


def _ratio(adjust_lr_fn: str | None, p: Tensor) -> float:
    m, n = p.shape
    return 0.2 * math.sqrt(max(m, n)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, m / n))


def _check_options(options: dict[str, Any]) -> None:
    """What torch checks of the whole optimizer, of one group too."""
    if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise InputError(
            f"Muon: adjust_lr_fn is {options['adjust_lr_fn']!r}; needs 'original', 'match_rms_adamw' or None."
        )
    if len(options["ns_coefficients"]) != 3 or not 0 <= options["ns_steps"] < 100:
        raise InputError("Muon: ns_coefficients are three numbers, ns_steps 0 to 99.")
    if options["ns_coefficients"][0] == 0:
        raise InputError("Muon: ns_coefficients[0] is 0, which loses small singular values; needs another number.")
