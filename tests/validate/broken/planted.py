"""Planting a fault: a wrong implementation of rms_norm takes the place of a backend for as long as a block lasts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright import ops
from tilewright.dispatch import Sample, contract, register_impl, unregister_impl

OP = "rms_norm"
BACKEND = "cpu"  # its own implementation is there again after each fault


@dataclass(frozen=True)
class Fault:
    """A deliberately broken implementation.

    mode           the mode of `check` that is there to catch it
    quiet          plain accuracy in eager mode does not see it
    fools_allclose the usual test, `torch.allclose(rtol=1e-2, atol=1e-2)`, passes it
    """

    name: str
    launch: Callable[..., None]
    direction: str
    mode: str
    quiet: bool
    fools_allclose: bool
    params: Mapping[str, Any] = field(default_factory=lambda: {"M": 192, "N": 256})
    dtype: torch.dtype = torch.bfloat16

    def sample(self, seed: int) -> Sample:
        return contract(OP).inputs(self.params, self.dtype, torch.device("cpu"), seed)


FAULTS: dict[str, Fault] = {}

MEMORY: dict[int, Tensor] = {}  # what a fault keeps from call to call


def fault(mode: str, *, direction: str = "fwd", quiet: bool = True, fools_allclose: bool, **options: Any) -> Any:
    """Register the decorated `launch` as a fault of its own name."""

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        name = launch.__name__
        FAULTS[name] = Fault(name, launch, direction, mode, quiet, fools_allclose, **options)
        return launch

    return register


@contextmanager
def planted(broken: Fault | None) -> Iterator[None]:
    """Make `broken` (None: nothing) part of a backend that is right otherwise."""
    MEMORY.clear()
    launches = {"fwd": correct, "bwd": correct_backward}
    if broken is not None:
        launches[broken.direction] = broken.launch
    for direction, launch in launches.items():
        register_impl(OP, backend=BACKEND, direction=direction)(launch)
    try:
        yield
    finally:
        for direction in launches:
            unregister_impl(OP, backend=BACKEND, direction=direction)


def correct(outs: tuple[Tensor], *args: Any, config: None) -> None:
    outs[0].copy_(contract(OP).forward.reference(*args))


def correct_backward(outs: tuple[Tensor, Tensor], *args: Any, config: None) -> None:
    for out, grad in zip(outs, contract(OP).gradient.op.reference(*args), strict=True):
        out.copy_(grad)


def passes_allclose(broken: Fault, seed: int) -> bool:
    """The usual test: both backends once on contiguous inputs, into one buffer, compared with a fixed tolerance."""
    x, weight = broken.sample(seed).args
    with planted(broken):
        if broken.direction == "bwd":
            ours, expected = (_gradients(backend, broken.sample(seed)) for backend in (BACKEND, "torch"))
            return all(torch.allclose(a, b, 1e-2, 1e-2) for a, b in zip(ours, expected, strict=True))
        buffer = ops.rms_norm(x, weight, out=torch.empty_like(x), backend="torch")
        expected = buffer.clone()
        ops.rms_norm(x, weight, out=buffer, backend=BACKEND)
        return torch.allclose(buffer, expected, 1e-2, 1e-2)


def _gradients(backend: str, sample: Sample) -> tuple[Tensor, ...]:
    x, weight = (a.clone().requires_grad_() for a in sample.args)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return torch.autograd.grad(ops.rms_norm(x, weight, backend=backend), (x, weight), cotangent)
