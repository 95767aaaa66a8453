"""Under torch.compile(fullgraph=True), with fixed and with symbolic sizes.

Compiled by Inductor where there is a GPU or a C++ compiler, else by aot_eager; the report says which.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewright.dispatch import Sample
from tilewright.validate.bits import same_bits
from tilewright.validate.case import Case, Findings
from tilewright.validate.modes.registry import mode
from tilewright.validate.rows import batch_size, rows_of


@mode("compile_static", heavy=True)
def compile_static(case: Case, findings: Findings) -> None:
    """torch.compile(fullgraph=True, dynamic=False), with and without gradients; our kernels give the bits of eager."""
    compiled = Compiled(case, findings, dynamic=False)
    sample = case.sample()
    outputs = compiled.call(sample)
    findings.outputs(outputs)
    if case.raw_calls(case.sample())[0].plan().launch is not None and case.contract.promises.deterministic:
        same = all(same_bits(a, b.contiguous()) for a, b in zip(case.call(case.sample()), outputs, strict=True))
        findings.require(same, "compiled and eager call give different bits")
    if case.positions:
        outputs, grads = case.differentiate(case.sample(), function=compiled.function)
        findings.outputs(outputs, "with gradients: ")
        findings.gradients(grads)


@mode("compile_dynamic", heavy=True)
def compile_dynamic(case: Case, findings: Findings) -> None:
    """torch.compile(fullgraph=True, dynamic=True): one graph serves several batch sizes."""
    size = batch_size(case)
    lengths = [size] if size is None or size < 4 else [size, size - 1, size // 2]
    for gradients in (False, True) if case.positions else (False,):
        compiled = Compiled(case, findings, dynamic=True)
        for length in lengths:
            prefix = "" if length is None else f"{length} rows: "
            sample = case.sample() if length in (None, size) else _dense(rows_of(case, case.sample(), 0, length or 0))
            truth = case.truth_of(sample)
            # The first call may trace twice: torch also tries floats as symbols
            graphs_before = compiled.graphs
            if gradients:
                _, grads = case.differentiate(sample, None, truth.cotangents, compiled.function)
                findings.gradients(grads, prefix, truth)
            else:
                findings.outputs(compiled.call(sample), prefix, truth)
            recompiled = length != lengths[0] and compiled.graphs > graphs_before
            findings.require(not recompiled, f"{prefix}compiled again, the graph before does not serve this batch size")


class Compiled:
    """The public function under torch.compile; `graphs` counts the graphs given to the compiler."""

    def __init__(self, case: Case, findings: Findings, *, dynamic: bool) -> None:
        self._case, op, op_backend = case, case.contract.function, case.backend
        name = case.compiler or available_compiler(case.device)
        note = f"compiled by {name}"
        if note not in findings.notes:
            findings.notes.append(note)
        self.graphs = 0
        backend = torch._dynamo.lookup_backend(name)

        def counting(module: Any, example: list[Tensor]) -> Callable[..., Any]:
            self.graphs += 1
            return backend(module, example)

        def public(*args: Any, **kwargs: Any) -> Any:  # Dynamo would guard on all attributes of a bound `case`
            return op(*args, **kwargs, backend=op_backend)

        torch._dynamo.reset()
        self.function: Callable[..., Any] = torch.compile(public, fullgraph=True, dynamic=dynamic, backend=counting)

    def call(self, sample: Sample) -> tuple[Tensor, ...]:
        """Outputs of the compiled function without gradients."""
        with torch.no_grad():
            result = self.function(*sample.args, **sample.kwargs)
        return self._case.observed(result, sample)


def available_compiler(device: torch.device) -> str:
    """The name of the torch.compile backend that can run here."""
    if device.type == "cuda":
        return "inductor"
    return "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"


def _dense(sample: Sample) -> Sample:
    values, structure = tree_flatten((sample.args, dict(sample.kwargs)))
    args, kwargs = tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in values], structure)
    return Sample(args, kwargs)
