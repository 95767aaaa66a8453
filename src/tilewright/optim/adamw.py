"""AdamW with one fused step a parameter."""

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import adamw, adamw_8bit
from tilewright.ops.optim.memory import is_dense
from tilewright.optim.averages import complete_averages, names_of_averages, state_dtypes
from tilewright.optim.clip import total_norm
from tilewright.optim.gradients import with_gradients

_HALF = (torch.bfloat16, torch.float16)
_OWN_OPTIONS = ("master_weights", "stochastic_rounding", "state_dtype", "seed", "max_grad_norm")
_REFUSED = {"amsgrad": "its maximum is a third state", "differentiable": "a step has no gradient"}


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step of a parameter is one launch of `ops.adamw` or `ops.adamw_8bit`, in float32
    whatever the dtype.

    params:   bf16|fp16|fp32 parameters, or groups of them; gradients have their dtypes.
    lr, betas, eps, weight_decay, maximize: as torch's.  lr may be a tensor of one float32.
    foreach, capturable, fused: torch's, kept for a torch optimizer that loads the state; every step here is fused, and
              reads no number on the host.  A CUDA graph keeps the value of a number lr; a tensor lr on the parameters'
              device is read by every replay.
    master_weights: a float32 copy of each parameter of 16 bits is its value; the parameter is that, rounded.
    stochastic_rounding: parameters without master and states in bf16 are rounded at random, right in the mean, by bits
              of Philox for (seed, number of the parameter, step, element): the same in every run.
    state_dtype: torch.float32; torch.bfloat16, which wants stochastic_rounding: to the nearest, an average that changes
              by less than a 256th of itself in a step does not change; or torch.uint8: codes of the dynamic map and a
              scale for 256 elements, for parameters of 4096 elements and more.
    seed:     0 to 2^31 - 1.
    max_grad_norm: clip the gradients to this norm, over all groups: the step divides them by max(1, (norm + 1e-6) /
              max_grad_norm), where `clip_grad_norm_` reads and writes every gradient once more.  They stay as they are.
              After a step `grad_norm` is the norm before, () float32 on the device.  None: no clipping.

    All of them are options of groups, max_grad_norm the same one of all. State: "step", "exp_avg" and "exp_avg_sq",
    as torch's, then "master" and "seed": either class loads the other's state_dict; states keep their precision here.
    Averages of 8 bits are "exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes" and "exp_avg_sq_scale", which torch's
    does not take; loaded averages become what state_dtype says in the next step. With a `torch.amp.GradScaler` the
    step divides by its scale, and leaves everything as it was after an overflow, without a host synchronisation.
    Raises InputError for amsgrad, differentiable, sparse and sharded gradients, before anything is written.
    """

    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        values = (master_weights, stochastic_rounding, state_dtype, seed, max_grad_norm)
        self._own_defaults = dict(zip(_OWN_OPTIONS, values, strict=True))
        _check_options({"amsgrad": amsgrad, "differentiable": differentiable, **self._own_defaults})
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach, capturable=capturable, fused=fused
        )
        self.defaults.update(self._own_defaults)
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; options that are not given are the optimizer's."""
        group = {**self._own_defaults, **param_group}
        _check_options(group)
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check_options(group)
        super().__setstate__(state)
        self._own_defaults = {name: self.defaults[name] for name in _OWN_OPTIONS}
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            for name, value in self._own_defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, which casts states to the dtype of their parameter: here they have the group's."""
        loaded: dict[str, Any] = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, final: loaded.update(final))  # after other hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        names = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for name, (p, group) in zip(names, self._parameters(), strict=True):
            for key, value in loaded["state"].get(name, {}).items():
                dtype = state_dtypes(group["state_dtype"]).get(key)
                if dtype is not None:
                    self.state[p][key] = torch.as_tensor(value).detach().to(p.device, dtype, copy=True)

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
        chosen = [with_gradients("AdamW", group["params"]) for group in self.param_groups]
        grad_scale = self._grad_scale([p.grad for params in chosen for p in params if p.grad is not None])
        numbers = {p: i for i, (p, _) in enumerate(self._parameters())}
        for group, params in zip(self.param_groups, chosen, strict=True):
            for p in params:
                self._complete(p, group, numbers[p])
            for device in dict.fromkeys(p.device for p in params):
                self._step_on(device, group, [p for p in params if p.device == device], grad_scale)
        return loss

    def _parameters(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Every parameter with its group, in torch's order."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _complete(self, p: Tensor, group: dict[str, Any], number: int) -> None:
        """Make those states of a parameter that it does not have yet."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        complete_averages(p, state, group["state_dtype"])
        if group["master_weights"] and p.dtype in _HALF and "master" not in state:
            state["master"] = p.detach().to(torch.float32)
        if group["stochastic_rounding"] and "seed" not in state:
            state["seed"] = torch.full((), (group["seed"] << 32) + number, dtype=torch.int64, device=p.device)

    def _grad_scale(self, grads: list[Tensor]) -> Tensor | None:
        """What a step divides gradients by: the scale of a GradScaler, and what clips them."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        limit, *others = {group["max_grad_norm"] for group in self.param_groups}
        if others:
            raise InputError(f"AdamW: groups have max_grad_norm {limit} and {others[0]}; it is one of all gradients.")
        if limit is None or not grads:
            return scale
        norm = total_norm(grads)
        scale = torch.ones_like(norm) if scale is None else scale.to(norm.device, torch.float32).view(())
        self.grad_norm = norm / scale
        return scale * ((self.grad_norm + 1e-6) / limit).clamp(min=1.0)

    def _step_on(
        self, device: torch.device, group: dict[str, Any], params: list[Tensor], grad_scale: Tensor | None
    ) -> None:
        """The step of the parameters of one group and device; the launches beside theirs are one a list."""
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        found_inf: Any = getattr(self, "found_inf", None)
        grad_scale, found_inf = (None if t is None else t.to(device, torch.float32) for t in (grad_scale, found_inf))
        options = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
        options |= {"lr": _on_device(group["lr"], device), "grad_scale": grad_scale, "found_inf": found_inf}
        torch._foreach_add_(steps, 1)
        for p, state in zip(params, states, strict=True):
            seed = state["seed"] if group["stochastic_rounding"] else None
            _step_parameter(p, state, {**options, "seed": seed}, group["master_weights"] and p.dtype in _HALF)
        if found_inf is not None:
            torch._foreach_sub_(steps, (found_inf != 0).to(torch.float32))


def _step_parameter(p: Tensor, state: dict[str, Any], options: dict[str, Any], has_master: bool) -> None:
    weight = state["master"] if has_master else p
    averages = tuple(state[name] for name in names_of_averages(state))
    outs = (weight, *averages, *((p,) if has_master else ()))
    inputs = (weight, p.grad, *averages, state["step"])
    options["copy_dtype"] = p.dtype if has_master else None
    op, in_place = (adamw, is_dense) if len(averages) == 2 else (adamw_8bit, Tensor.is_contiguous)
    if all(map(in_place, outs)):
        op(*inputs, **options, out=outs)
    else:  # a parameter that is a part of another tensor, or in another order than its codes
        for t, result in zip(outs, op(*inputs, **options), strict=True):
            t.copy_(result)


def _on_device(lr: float | Tensor, device: torch.device) -> Tensor:
    """A tensor in any case: a number would make another signature of the op's call in every step of a schedule."""
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float32)
    return torch.full((), lr, dtype=torch.float32, device=device)


def _check_options(options: dict[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if options.get(name):
            raise InputError(f"AdamW: {name}=True; needs False: {reason}. Use torch.optim.AdamW for it.")
    if options.get("state_dtype", torch.float32) not in (torch.float32, torch.bfloat16, torch.uint8):
        raise InputError(
            f"AdamW: state_dtype is {options['state_dtype']}; needs torch.float32, torch.bfloat16 or torch.uint8."
        )
    limit = options.get("max_grad_norm")
    if limit is not None and not 0 < limit < math.inf:
        raise InputError(f"AdamW: max_grad_norm is {limit}; needs a finite number above 0, or None.")
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
        raise InputError(f"AdamW: seed is {seed!r}; needs an integer from 0 to 2^31 - 1.")
