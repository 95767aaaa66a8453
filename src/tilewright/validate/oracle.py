"""The expected results of a call: float64 results and gradients of the contract's reference, and torch's own errors.

The oracle gets the low-precision inputs upcast, so the rounding of inputs is not counted as an error.  Cotangents are
random: a gradient summed with ones hides every error that cancels.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Contract, Sample
from tilewright.dispatch.effects import as_tuple, pure
from tilewright.validate.jitter import JitteredTerms, jittered
from tilewright.validate.rule import Standard, standard

JITTERS = 8

Derivation = Callable[[Callable[..., Any], Sample, tuple[Tensor, ...]], dict[str, Tensor]]
"""(function, sample, extras) -> tensors by name, which autograd derives from one call.   extras: tangents, ..."""


@dataclass(frozen=True)
class Truth:
    """Standards for the outputs of one call, and for the gradients of inputs (by position) given `cotangents`.

    outputs: none where a caller gave the cotangents, and wants the gradients.
    """

    outputs: tuple[Standard, ...]
    cotangents: tuple[Tensor, ...]
    gradients: Mapping[int, Standard]


def gradient_inputs(contract: Contract, sample: Sample) -> tuple[int, ...]:
    """Positions of the arguments with gradients.  Public and raw arguments begin with the same tensors."""
    if contract.gradient is None:
        return ()
    return tuple(i for i in contract.gradient.inputs if i < len(sample.args) and isinstance(sample.args[i], Tensor))


def differentiate(
    function: Callable[..., Any], sample: Sample, positions: Sequence[int], cotangents: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], dict[int, Tensor | None]]:
    """(outputs, gradients by position) of `function`; an output whose cotangent is None stays unused."""
    args = list(sample.args)
    for i in positions:
        args[i] = args[i].detach().requires_grad_()
    with torch.enable_grad():
        outputs = as_tuple(function(*args, **sample.kwargs))
        # an output that depends on none of `positions` is a constant
        used = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if g is not None and o.requires_grad]
        leaves = [args[i] for i in positions]
        grads = torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True)
    return tuple(o.detach() for o in outputs), dict(zip(positions, grads, strict=True))


def truth(contract: Contract, sample: Sample, seed: int, cotangents: Sequence[Tensor] | None = None) -> Truth:
    """Compute the standards of one call without our kernels.

    cotangents: those of the gradients, of which alone there are standards then; None draws normal values from `seed`.
    """
    positions = gradient_inputs(contract, sample)
    generator = torch.Generator().manual_seed(seed)
    reference = pure(contract, contract.reference)
    judged = 0
    if cotangents is None:
        with torch.no_grad():
            baseline = reference(*sample.args, **sample.kwargs)
        judged = len(baseline)
        cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in baseline]
    jitter_dtype = jitter_dtype_of(sample)

    def run_reference(dtype: torch.dtype | None, noise: torch.Generator | None = None) -> Any:
        """(outputs, gradients) of the reference on inputs in `dtype`; these and its sums jittered by `noise`."""
        args, kwargs, grads = convert((sample.args, dict(sample.kwargs), tuple(cotangents)), dtype, noise)
        with _jittered_terms(dtype, noise):
            if positions:
                return differentiate(contract.reference, Sample(args, kwargs), positions, grads)
            with torch.no_grad():
                return reference(*args, **kwargs), {}

    exact, native = run_reference(torch.float64), run_reference(None)
    noisy = [run_reference(jitter_dtype, generator) for _ in range(JITTERS)]
    names = argument_names(contract)
    outputs = tuple(
        standard(
            _output_name(i, judged), exact[0][i], native[0][i], [n[0][i] for n in noisy], contract.tolerance,
            order=_cut_off(sample, native[0][i]),
        )
        for i in range(judged)
    )  # fmt: skip
    gradients = {
        i: standard(
            f"d{names[i]}",
            _dense(exact[1][i], sample.args[i]).to(torch.float64),
            _dense(native[1][i], sample.args[i]).to(sample.args[i].dtype),
            [_dense(n[1][i], sample.args[i]) for n in noisy],
            contract.tolerance_of(names[i]),
        )
        for i in positions
    }
    return Truth(outputs, tuple(cotangents), gradients)


TENSOR_CORES = 2.0**-21
"""Share of a sum that tensor cores may lose: they add in float32 and truncate, up to 2^-23 of it a step.  On an H200
4.5e-7 of the norm were lost in sums of 50 products of bf16; cuBLAS adds so few without tensor cores.
"""


def _cut_off(sample: Sample, output: Tensor) -> float:
    """The relative error of tensor cores where it shows: in float32 results of narrower operands on a GPU."""
    operands = [t for t in (*sample.args, *sample.kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    narrow = any(t.element_size() < 4 for t in operands)
    return TENSOR_CORES if narrow and output.dtype == torch.float32 and output.device.type == "cuda" else 0.0


def derive_standards(
    contract: Contract, sample: Sample, seed: int, extras: Sequence[Tensor], compute: Derivation
) -> dict[str, Standard]:
    """Standards, by name, for what `compute` derives from the op, its sample and `extras` such as tangents.

    Raises NotImplementedError where autograd cannot derive it from the reference, or the reference overflows.
    """
    generator = torch.Generator().manual_seed(seed)

    def run_derivation(dtype: torch.dtype | None, noise: torch.Generator | None = None) -> dict[str, Tensor]:
        """What `compute` derives from the reference on inputs in `dtype`; these and its sums jittered by `noise`."""
        args, kwargs, cast_extras = convert((sample.args, dict(sample.kwargs), tuple(extras)), dtype, noise)
        try:
            with _jittered_terms(dtype, noise):
                return compute(contract.reference, Sample(args, kwargs), cast_extras)
        except RuntimeError as error:
            raise NotImplementedError(str(error).split("\n", 1)[0]) from error

    exact, native = run_derivation(torch.float64), run_derivation(None)
    lost = [name for name, t in native.items() if not t.isfinite().all() and exact[name].to(t.dtype).isfinite().all()]
    if lost:
        raise NotImplementedError(f"{', '.join(lost)} is not finite in {native[lost[0]].dtype}, and the oracle's is")
    noisy = [run_derivation(jitter_dtype_of(sample), generator) for _ in range(JITTERS)]
    return {
        name: standard(name, exact[name], native[name], [n[name] for n in noisy], contract.widest_gradient_tolerance)
        for name in exact
    }


def _jittered_terms(dtype: torch.dtype | None, noise: torch.Generator | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None or noise is None else JitteredTerms(dtype, noise)


def argument_names(contract: Contract) -> list[str]:
    """Names of the public function's parameters, in order."""
    return list(inspect.signature(contract.function).parameters)


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    """Replace None, autograd's gradient of an input that no used output depends on, by zeros."""
    return torch.zeros_like(like) if grad is None else grad


def jitter_dtype_of(sample: Sample) -> torch.dtype:
    """The dtype of the jittered runs: float32, or float64 if an input has it."""
    dtypes = [a.dtype for a in sample.args if isinstance(a, Tensor) and a.is_floating_point()]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def convert(values: Any, dtype: torch.dtype | None, noise: torch.Generator | None = None) -> Any:
    """Cast floating-point tensors in `values` to `dtype` (None: keep theirs); `noise` adds up to one rounding error."""

    def cast(v: Any) -> Any:
        if dtype is None or not isinstance(v, Tensor) or not v.is_floating_point():
            return v
        v = v.to(dtype)
        return v if noise is None else jittered(v, noise)

    return tree_map(cast, values)


def _output_name(index: int, count: int) -> str:
    return "y" if count == 1 else f"y{index}"
