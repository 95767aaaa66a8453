"""What a call should have given: float64 results and gradients of the contract's reference, and what torch makes of it.

The oracle sees the low-precision inputs upcast, so input rounding is nobody's error.  Cotangents are random: a gradient
summed with ones hides every error that cancels.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Contract, Sample
from tilewright.validate.rule import Standard, standard

JITTERS = 8

Derivation = Callable[[Callable[..., Any], Sample, tuple[Tensor, ...]], dict[str, Tensor]]
"""(function, sample, further tensors) -> tensors by name: what autograd makes of one call."""


@dataclass(frozen=True)
class Truth:
    """Standards for the outputs of one call, and for the gradients of inputs (by position) given `cotangents`."""

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
    """All that is known about one call without our kernels.  `cotangents`: given, or normal values from `seed`."""
    positions = gradient_inputs(contract, sample)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        baseline = as_tuple(contract.reference(*sample.args, **sample.kwargs))
    if cotangents is None:
        cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in baseline]
    jitter_dtype = wider(sample)

    def at(dtype: torch.dtype | None, noise: torch.Generator | None = None) -> Any:
        args, kwargs, grads = converted((sample.args, dict(sample.kwargs), tuple(cotangents)), dtype, noise)
        if positions:
            return differentiate(contract.reference, Sample(args, kwargs), positions, grads)
        with torch.no_grad():
            return as_tuple(contract.reference(*args, **kwargs)), {}

    exact, same = at(torch.float64), at(None)
    noisy = [at(jitter_dtype, generator) for _ in range(JITTERS)]
    names = argument_names(contract)
    outputs = tuple(
        standard(
            _output_name(i, len(baseline)), exact[0][i], same[0][i], [n[0][i] for n in noisy], contract.tolerance,
            order=_cut_off(sample, same[0][i]),
        )
        for i in range(len(baseline))
    )  # fmt: skip
    gradients = {
        i: standard(
            f"d{names[i]}",
            _dense(exact[1][i], sample.args[i]).to(torch.float64),
            _dense(same[1][i], sample.args[i]).to(sample.args[i].dtype),
            [_dense(n[1][i], sample.args[i]) for n in noisy],
            contract.gradient_tolerance,
        )
        for i in positions
    }
    return Truth(outputs, tuple(cotangents), gradients)


TENSOR_CORES = 2.0**-21
"""Share of a sum that tensor cores may lose: adding in float32 they cut off, up to 2^-23 of it a step.  On an H200
4.5e-7 of the norm were lost in sums of 50 products of bf16; cuBLAS adds so few without tensor cores.
"""


def _cut_off(sample: Sample, output: Tensor) -> float:
    """The relative error of tensor cores where it shows: in float32 results of narrower operands on a GPU."""
    operands = [t for t in (*sample.args, *sample.kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    narrow = any(t.element_size() < 4 for t in operands)
    return TENSOR_CORES if narrow and output.dtype == torch.float32 and output.device.type == "cuda" else 0.0


def derived(
    contract: Contract, sample: Sample, seed: int, further: Sequence[Tensor], compute: Derivation
) -> dict[str, Standard]:
    """Standards, by name, for what `compute` derives from the op, its sample and further tensors, say tangents.

    Raises NotImplementedError where the reference cannot be derived so, or overflows on the way.
    """
    generator = torch.Generator().manual_seed(seed)

    def at(dtype: torch.dtype | None, noise: torch.Generator | None = None) -> dict[str, Tensor]:
        args, kwargs, others = converted((sample.args, dict(sample.kwargs), tuple(further)), dtype, noise)
        try:
            return compute(contract.reference, Sample(args, kwargs), others)
        except RuntimeError as error:
            raise NotImplementedError(str(error).split("\n", 1)[0]) from error

    exact, same = at(torch.float64), at(None)
    lost = [name for name, t in same.items() if not t.isfinite().all() and exact[name].to(t.dtype).isfinite().all()]
    if lost:
        raise NotImplementedError(f"{', '.join(lost)} is not finite in {same[lost[0]].dtype}, and the oracle's is")
    noisy = [at(wider(sample), generator) for _ in range(JITTERS)]
    return {
        name: standard(name, exact[name], same[name], [n[name] for n in noisy], contract.gradient_tolerance)
        for name in exact
    }


def argument_names(contract: Contract) -> list[str]:
    """Names of the public function's parameters, in order."""
    return list(inspect.signature(contract.function).parameters)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """One result or several, as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    """autograd says None for an input that no used output depends on; the gradient is zero."""
    return torch.zeros_like(like) if grad is None else grad


def wider(sample: Sample) -> torch.dtype:
    """The type in which jitter is looked at: float32, or float64 where an input has it."""
    dtypes = [a.dtype for a in sample.args if isinstance(a, Tensor) and a.is_floating_point()]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def converted(values: Any, dtype: torch.dtype | None, noise: torch.Generator | None = None) -> Any:
    """`values` with floating-point tensors in `dtype` (None: as they are); with `noise`, off by up to one rounding."""

    def convert(v: Any) -> Any:
        if dtype is None or not isinstance(v, Tensor) or not v.is_floating_point():
            return v
        v = v.to(dtype)
        if noise is None:
            return v
        jitter = 2 * torch.rand(v.shape, generator=noise, device=noise.device) - 1
        return v * (1 + torch.finfo(dtype).eps / 2 * jitter.to(v))

    return tree_map(convert, values)


def _output_name(index: int, count: int) -> str:
    return "y" if count == 1 else f"y{index}"
