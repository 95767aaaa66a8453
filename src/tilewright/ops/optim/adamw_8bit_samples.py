"""Random problems of `adamw_8bit`, its cases and its refusals."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops.optim import adamw_samples
from tilewright.ops.optim.dynamic_map import to_codes

_NAMES = ("param", "grad", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "step")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `adamw` but the dtype of its states, whose values these are, of 8 bits; special (a NaN and an
    infinity among the gradients).
    """
    sample = adamw_samples.inputs(params, dtype, device, seed)
    param, grad, exp_avg, exp_avg_sq, step = sample.args
    if params.get("special"):
        grad.view(-1)[3], grad.view(-1)[-2] = torch.nan, torch.inf
    states: list[Tensor] = []
    for values, signed in ((exp_avg, True), (exp_avg_sq, False)):
        codes, scales = to_codes(values, signed)
        states += [torch.empty_like(values, dtype=torch.uint8).copy_(codes), scales]
    return Sample((param, grad, *states, step), sample.kwargs)


def _bad(name: str, match: str, changed: str, change: Callable[[Any], Any]) -> BadInput:
    def make(device: torch.device) -> Sample:
        sample = inputs({"N": 300}, torch.bfloat16, device, 0)
        arguments = {**dict(zip(_NAMES, sample.args, strict=True)), **sample.kwargs}
        arguments[changed] = change(arguments.get(changed))
        return Sample(tuple(arguments.pop(name) for name in _NAMES), arguments)

    return BadInput(name, make, match)


_PRECISIONS = (torch.bfloat16, torch.float32)
WORKLOADS = (
    Workload("llama8b_up", {"shape": (14336, 4096), "rate": True}, _PRECISIONS, ("fwd",)),
    Workload("llama8b_up_master", {"shape": (14336, 4096), "rate": True, "master": True}, directions=("fwd",)),
    Workload("llama8b_up_rounded", {"shape": (14336, 4096), "rate": True, "seed": 11}, directions=("fwd",)),
)
CPU_WORKLOADS = (Workload("small", {"shape": (512, 512)}, _PRECISIONS, ("fwd",)),)
EDGE_CASES = (
    Workload("first: the first step, with a rate on the device", {"N": 257, "step": 1.0, "rate": True}),
    Workload("permuted: blocks in the order of elements", {"shape": (19, 33), "permuted": True, "seed": 5}),
    Workload("scaled: a gradient scale, maximised", {"N": 64, "grad_scale": 8.0, "found_inf": 0.0, "maximize": True}),
    Workload("found_inf: all stay as they were", {"N": 300, "found_inf": 1.0, "master": True, "seed": 11}),
    Workload("master: rounded copies, without decay", {"N": 1030, "master": True, "weight_decay": 0.0}),
    Workload("special: NaN and infinity take their blocks", {"N": 1283, "special": True}),
    Workload("one: a scalar parameter", {"shape": ()}),
    Workload("empty: no elements", {"shape": (0, 4)}),
)
BAD_INPUTS = (
    _bad("other shape", r"grad is \(299,\)", "grad", lambda t: t[1:]),
    _bad("states in float32", "exp_avg is torch.float32; needs torch.uint8", "exp_avg", Tensor.float),
    _bad("signed codes", "exp_avg_sq is torch.int8; needs torch.uint8", "exp_avg_sq", Tensor.char),
    _bad("a scale too few", r"exp_avg_scale is \(1,\) .*; needs \(2,\)", "exp_avg_scale", lambda t: t[1:]),
    _bad("half a scale", r"exp_avg_sq_scale is \(2,\) torch.float16", "exp_avg_sq_scale", Tensor.half),
    _bad("no scale", "exp_avg_scale is a NoneType", "exp_avg_scale", lambda t: None),
    _bad("copy of bf16", "a float32 param may have a copy", "copy_dtype", lambda _: torch.float16),
    _bad("beta of 1", r"betas\[1\] is 1.0; needs a number in \[0, 1\)", "betas", lambda _: (0.9, 1.0)),
)
