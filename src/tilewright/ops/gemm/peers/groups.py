"""What other libraries' grouped products share: which problems they take, and sizes of groups on the host."""

from importlib import import_module

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.operands import FP8
from tilewright.ops.peer import Call

REPLACES = {"cuda": ("eager", "compile")}
"""Eager torch would be the reference, whose masks are no competitor."""


def plain(sample: Sample) -> bool:
    """bfloat16 without scales, an epilogue or another type of result: what torch's grouped products take."""
    options = sample.kwargs
    same = options.get("out_dtype") in (None, torch.bfloat16)
    return bool(sample.args[0].dtype == torch.bfloat16 and same and not options.get("activation"))


def slices(ends: Tensor) -> list[slice]:
    """Rows of the groups, read once, before anything is timed."""
    limits = ends.tolist()
    return [slice(start, end) for start, end in zip([0, *limits], limits, strict=False)]


def deep_gemm_rows(sample: Sample, name: str, result: tuple[int, ...], *metadata: object) -> Call | None:
    """DeepGEMM's `name` of nt operands, float8 with 1x128 and 128x128 scales, or bfloat16."""
    a, b, _ = sample.args
    options = sample.kwargs
    if options.get("activation") or b.mT.stride(-1) != 1:
        return None
    kind = "fp8" if a.dtype == FP8 else "bf16"
    multiply = getattr(import_module("deep_gemm"), name.format(kind), None)
    if multiply is None:
        return None
    left, right = a, b.mT
    if kind == "fp8":
        left, right = (a, options["scale_a"]), (right, options["scale_b"].mT)

    def call() -> Tensor:
        d = torch.empty(result, dtype=torch.bfloat16, device=a.device)
        multiply(left, right, d, *metadata)
        return d

    return call
