"""Muon: momentum whose singular values are made about 1, for the matrices of hidden layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import bmm
from tilewright.optim.gradients import with_gradients

_BATCH = 1 << 28  # elements of the matrices that are made orthogonal at once: 512 MiB a temporary


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

    Matrices of equal shape and dtype are one batch: three `ops.bmm` an iteration, bf16 with float32 sums.  A is
    symmetric and computed in full.  The state, "momentum_buffer", is torch's.
    Raises InputError for parameters that are no matrices, sparse and sharded gradients; ValueError, as torch does, for
    numbers out of range.
    Source: Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025.
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
        x = torch.stack([t.to(torch.bfloat16) for t in directions])
        updates = orthogonal(x, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(torch.float32)
        lr = lr.to(updates.device) if isinstance(lr, Tensor) else lr
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(params, list(updates * (lr * _ratio(group["adjust_lr_fn"], params[0]))))

    def _momentum_buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonal(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """About U V^T of each matrix U S V^T of x (B, M, N) bf16, by Newton-Schulz iterations of the shorter side."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp(min=eps)).to(torch.bfloat16)
    for _ in range(steps):
        gram = bmm(x, x, trans_b=True)
        x = bmm(bmm(gram, gram, alpha=c, c=b * gram), x, c=a * x)
    return x.mT if tall else x


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
