"""Random problems of `adamw`, its cases and its refusals."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: N elements, or shape; step; state (their dtype), master (param in float32, of dtypes of 16 bits), seed,
    rate (lr as a tensor), grad_scale, found_inf, maximize, weight_decay, permuted (dimensions of memory reversed),
    other_order (of the gradient).

    The average of squares is at least that of gradients squared, as after many steps.
    """
    shape = tuple(params.get("shape", (params.get("N", 0),)))
    rng = rows.generator(seed)

    def tensor(kind: torch.dtype, scale: float = 1.0) -> Tensor:
        if params.get("permuted"):
            return rows.random_tensor(shape[::-1], kind, device, rng, scale).permute(*range(len(shape))[::-1])
        return rows.random_tensor(shape, kind, device, rng, scale)

    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    master = bool(params.get("master")) and dtype != torch.float32
    param = tensor(torch.float32 if master else dtype)
    grad = tensor(dtype)
    if params.get("other_order"):
        grad = grad.contiguous()
    state = params.get("state", torch.float32)
    exp_avg = tensor(torch.float32, 0.3)
    exp_avg_sq = exp_avg.square() + tensor(torch.float32).square()
    kwargs: dict[str, Any] = {name: params[name] for name in ("maximize", "weight_decay") if name in params}
    if master:
        kwargs["copy_dtype"] = dtype
    if params.get("seed"):
        kwargs["seed"] = torch.tensor(params["seed"], dtype=torch.int64, device=device)
    kwargs["lr"] = scalar(0.01) if params.get("rate") else 0.01
    for name in ("grad_scale", "found_inf"):
        if name in params:
            kwargs[name] = scalar(params[name])
    return Sample((param, grad, exp_avg.to(state), exp_avg_sq.to(state), scalar(params.get("step", 7.0))), kwargs)


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object]) -> BadInput:
    def make(device: torch.device) -> Sample:
        sample = inputs({"N": 12}, torch.bfloat16, device, 0)
        names = ("param", "grad", "exp_avg", "exp_avg_sq", "step")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in names), arguments)

    return BadInput(name, make, match)


def _replaced(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({name: change(arguments[name])})


_PRECISIONS = (torch.bfloat16, torch.float32)
_BF16 = {"state": torch.bfloat16, "seed": 11}
WORKLOADS = (
    Workload("llama8b_up", {"shape": (14336, 4096), "rate": True}, _PRECISIONS, ("fwd",)),
    Workload("llama8b_up_master", {"shape": (14336, 4096), "rate": True, "master": True}, directions=("fwd",)),
    Workload("llama8b_up_bf16", {"shape": (14336, 4096), "rate": True, **_BF16}, directions=("fwd",)),
    Workload("llama8b_norm", {"N": 4096, "rate": True}, _PRECISIONS, ("fwd",)),
)
CPU_WORKLOADS = (Workload("small", {"shape": (512, 512)}, _PRECISIONS, ("fwd",)),)
EDGE_CASES = (
    Workload("first: the first step, with a rate on the device", {"N": 257, "step": 1.0, "rate": True}),
    Workload("permuted: dense, in another order", {"shape": (3, 5, 7), "permuted": True, "seed": 5}),
    Workload(
        "other_order: the gradient in another than param", {"shape": (9, 6), "permuted": True, "other_order": True}
    ),
    Workload("scaled: a gradient scale, maximised", {"N": 64, "grad_scale": 8.0, "found_inf": 0.0, "maximize": True}),
    Workload("found_inf: all stay as they were", {"N": 40, "found_inf": 1.0, "master": True, **_BF16}),
    Workload("master: rounded copies, without decay", {"N": 1030, "master": True, "weight_decay": 0.0}),
    Workload("states: of 16 bits, rounded at random", {"N": 1283, **_BF16}),
    Workload("one: a scalar parameter", {"shape": ()}),
    Workload("empty: no elements", {"shape": (0, 4)}),
)
BAD_INPUTS = (
    _bad("other shape", r"grad is \(11,\)", _replaced("grad", lambda t: t[1:])),
    _bad("gradient in float32", "grad is torch.float32; needs torch.bfloat16", _replaced("grad", Tensor.float)),
    _bad("integers", "param is torch.int32", _replaced("param", Tensor.int)),
    _bad("states in float16", "both must be float32, or both bfloat16", _replaced("exp_avg", Tensor.half)),
    _bad("step of 64 bits", "step is .* torch.int64", _replaced("step", Tensor.long)),
    _bad("step on the host", "step is a float", _replaced("step", lambda t: 7.0)),
    _bad("copy of bf16", "a float32 param may have a copy", lambda a: a.update(copy_dtype=torch.float16)),
    _bad("seed as a number", "seed is a int", lambda a: a.update(seed=3)),
    _bad("negative rate", "lr is -1.0; needs a number of at least 0", lambda a: a.update(lr=-1.0)),
    _bad("beta of 1", r"betas\[1\] is 1.0; needs a number in \[0, 1\)", lambda a: a.update(betas=(0.9, 1.0))),
    _bad("one beta", "betas is 0.9; needs two numbers", lambda a: a.update(betas=0.9)),
)
