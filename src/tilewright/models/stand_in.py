"""Run a module's own forward on random input without touching the module, and compare.

A stand-in shares the class and attributes of a module and gets its own random parameters, small children and cloned
buffers. Its forward is therefore the module's forward, but a probe can neither change the model (BatchNorm's running
statistics) nor be misled by weights that happen to be ones or zeros, and it costs microseconds however large the
model is.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.errors import TilewrightError
from tilewright.models.report import Kind
from tilewright.models.specialise import Recipe
from tilewright.models.transformers_names import is_subclassed_freely, wraps_subclasses

Match = Literal["bitwise", "to rounding"]


@dataclass(frozen=True)
class Proposal:
    """A recipe that reproduces a module, the ops it calls, and one line of the report: what will run."""

    kind: Kind
    recipe: Recipe
    ops: tuple[str, ...]
    text: str


class NotReplaceable(Exception):
    """A module looks replaceable but is left as it is; the text is the reason."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind


def stand_in(
    module: nn.Module,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """Copy a module: same class and attributes, with these parameters and children in place of its own.

    Children that are not given are copied: they must be small (activations, dropouts).
    """
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    if wraps_subclasses(type(module)):
        clone.__dict__["gradient_checkpointing"] = False  # it would wrap the forward under comparison
    replacements = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in (parameters or {}).items()}
    clone.__dict__["_parameters"] = {**module._parameters, **replacements}
    clone.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    clone.__dict__["_modules"] = {
        name: (children or {}).get(name) or copy.deepcopy(child) for name, child in module._modules.items()
    }
    return clone


_planned: ContextVar[torch.device | None] = ContextVar("tilewright_planned_device", default=None)


@contextmanager
def planned_for(device: torch.device) -> Iterator[None]:
    """Inside the block, decide by what was measured on `device`, whatever device holds the weights."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def serving_device(device: torch.device) -> torch.device:
    """The device on which a module with parameters on `device` will run."""
    return _planned.get() or device


_unmeasured: ContextVar[bool] = ContextVar("tilewright_unmeasured_sizes", default=False)


@contextmanager
def unmeasured_sizes() -> Iterator[None]:
    """Inside the block, patches replace linear layers and attention without a measurement, and their calls run so.

    The tuner looks for what is worth measuring: a model that was never tuned would show it none of its products.
    """
    token = _unmeasured.set(True)
    try:
        yield
    finally:
        _unmeasured.reset(token)


def takes_unmeasured() -> bool:
    """True inside `unmeasured_sizes`."""
    return _unmeasured.get()


def call(kind: Kind, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the model's code on probe inputs; an exception becomes the reason for leaving the module."""
    try:
        return forward(*args, **kwargs)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise NotReplaceable(kind, f"raised {type(error).__name__} on the probe input: {first_line}") from error


def run_both(
    kind: Kind, theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kwargs: Any
) -> Match | None:
    """Run both on the same arguments and compare; None where our op refuses them.

    Raises NotReplaceable where `theirs` fails.
    """
    expected = call(kind, theirs, *args, **kwargs)
    try:
        got = ours(*args, **kwargs)
    except TilewrightError:
        return None
    return match(got, expected)


def match(got: Any, expected: Any) -> Match | None:
    """`bitwise`, `to rounding`, or None.  Tuples match as their weakest element.

    To rounding: every element within two units of roundoff of its own size, or of the tensor's rms if that is larger.
    """
    if isinstance(got, tuple) and isinstance(expected, tuple) and len(got) == len(expected):
        return weakest([match(g, e) for g, e in zip(got, expected, strict=True)])
    if not (isinstance(got, Tensor) and isinstance(expected, Tensor)):
        return None
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return None
    if torch.equal(got, expected):
        return "bitwise"
    exact, other = expected.double(), got.double()
    scale = exact.abs().clamp_min(exact.square().mean().sqrt().item())
    close = (other - exact).abs() <= 2 * torch.finfo(expected.dtype).eps * scale
    return "to rounding" if bool(close.all()) else None


def weakest(matches: Sequence[Match | None]) -> Match | None:
    """The verdict over several probe cases: None if one failed, `bitwise` only if all were."""
    if not matches or None in matches:
        return None
    return "to rounding" if "to rounding" in matches else "bitwise"


def obstacle(module: nn.Module) -> str | None:
    """Why the class of this instance cannot be swapped, or None."""
    if "forward" in module.__dict__:
        return "its forward is overridden on the instance (by an offloading or adapter hook)"
    if not inspect.isfunction(inspect.getattr_static(type(module), "forward", None)):
        return "its forward is not a plain Python function"
    if hasattr(type(module).__init_subclass__, "__func__") and not is_subclassed_freely(type(module)):
        return "its class acts on being subclassed (__init_subclass__)"
    return None


def only_argument(module: nn.Module) -> str | None:
    """Name of the only argument of a module's forward, or None if it takes more or fewer."""
    forward = inspect.getattr_static(type(module), "forward", None)
    if not inspect.isfunction(forward):
        return None
    _, *rest = inspect.signature(forward).parameters.values()
    return rest[0].name if len(rest) == 1 and rest[0].kind is rest[0].POSITIONAL_OR_KEYWORD else None


def placement(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the first floating parameter of two bytes or more; else of the first, and float32."""
    parameters = list(module.parameters())
    floating = [p for p in parameters if p.is_floating_point() and p.dtype.itemsize > 1]
    first = (floating or parameters)[0]
    return first.device, first.dtype if floating else torch.float32


@contextmanager
def probing(device: torch.device) -> Iterator[None]:
    """Disable gradients, autocast and warnings inside the block, and fix the seed; random states are restored."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would reach devices that were not forked
        for forked in devices:
            torch.cuda.default_generators[forked.index].manual_seed(0)
        with warnings.catch_warnings(action="ignore"):  # torch warns of mixed dtypes, which only the probe has
            yield
