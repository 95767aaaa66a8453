"""Rotary embedding: the function an attention module calls, replaced by `ops.apply_rope` for that module alone.

Model code calls a function of its own file, such as `apply_rotary_pos_emb`, from inside attention's forward.
Rebinding that name in the file would change every model of the family in the process. Instead the instance's class
gets a copy of forward whose global names are a copy in which this one name is ours; the original function and its
file are not touched. A function is replaced only after it reproduced, on random q, k, cos and sin, one of the styles
below; each style is one way to call `ops.apply_rope`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.stand_in import Left, Match, Proposal, compare, obstacle, placement, probing, weakest

# half          pairs (i, i + R/2); the table repeats its first half (Llama)
# interleaved   pairs (2i, 2i + 1); the output is interleaved too
# to_halves     pairs (2i, 2i + 1) in, halves out (DeepSeek-V3)
# complex       pairs (2i, 2i + 1), one complex table instead of cos and sin (DeepSeek-V2)
Style = Literal["half", "interleaved", "to_halves", "complex"]


@dataclass(frozen=True)
class RotaryRecipe:
    """Attention's own forward with global functions replaced: (name, style, names of the arguments after the table)."""

    functions: tuple[tuple[str, Style, tuple[str, ...]], ...]
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """A copy of `cls.forward` that sees our functions under the old names."""
        forward = inspect.getattr_static(cls, "forward")
        names = dict(forward.__globals__)
        # torch.compile looks for the globals of a named module in that module, where the original still stands.
        del names["__name__"]
        for name, style, rest in self.functions:
            names[name] = _replacement(style, rest, self.backend)
        copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        copied.__module__ = forward.__module__
        copied.__qualname__ = forward.__qualname__
        return copied

    def __str__(self) -> str:
        return ", ".join(f"{name} -> ops.apply_rope ({style})" for name, style, _ in self.functions)


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """The rotary functions that forward calls; None if it calls none.  Raises Left if one of them is not ours."""
    forward = inspect.getattr_static(type(module), "forward", None)
    if not inspect.isfunction(forward) or not (names := _rotary_names(inspect.unwrap(forward))):
        return None
    if not list(module.parameters()):
        return None
    if forward is not inspect.unwrap(forward):
        raise Left("rotary", "its forward is wrapped by a decorator")
    if reason := obstacle(module):
        raise Left("rotary", reason)
    device, dtype = placement(module)
    found: list[tuple[str, Style, tuple[str, ...]]] = []
    verdicts: list[Match | None] = []
    for name in names:
        rest, style, verdict = _style(forward.__globals__[name], device, dtype)
        found.append((name, style, rest))
        verdicts.append(verdict)
    recipe = RotaryRecipe(tuple(found), backend)
    return Proposal("rotary", recipe, ("apply_rope",), f"{recipe} ({weakest(verdicts)})")


def _rotary_names(forward: Any) -> list[str]:
    """Global functions that forward calls and that are named like rotary embeddings; `_style` asks what they do."""
    return [
        name
        for name in forward.__code__.co_names
        if ("rotary" in name or "rope" in name)
        and callable(forward.__globals__.get(name))
        and not isinstance(forward.__globals__[name], type)
    ]


def _replacement(style: Style, rest: tuple[str, ...], backend: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function with the original's parameters that rotates by `ops.apply_rope`."""
    if style == "complex":

        def rotate_complex(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (part.repeat_interleave(2, dim=-1) for part in (table.real, table.imag))
            return ops.apply_rope(q, k, cos, sin, interleaved=True, backend=backend)

        return rotate_complex

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        heads_dim = {**dict(zip(rest, args, strict=False)), **kwargs}.get("unsqueeze_dim", 1)
        if heads_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if style == "to_halves":
            q, k = _halves(q), _halves(k)
        q, k = ops.apply_rope(q, k, cos, sin, interleaved=style == "interleaved", backend=backend)
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads_dim == 2 else (q, k)

    return rotate


def _halves(x: Tensor) -> Tensor:
    """(..., D) with pairs side by side -> the same pairs half a row apart."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@functools.cache
def _style(
    function: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], Style, Match]:
    """Which style reproduces `function` in every case it accepts; asked once for all layers."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError as error:
        raise Left("rotary", f"{function!r} has no readable signature") from error
    if len(parameters) == 3:
        verdict = weakest([_complex_match(function, device, dtype), _complex_match(function, device, torch.float32)])
        if verdict:
            return (), "complex", verdict
    rest = tuple(parameters[4:])
    if len(parameters) >= 4 and set(rest) <= {"unsqueeze_dim", "position_ids"}:
        for style in ("half", "interleaved", "to_halves"):
            cases = [_match(function, style, rest, device, d) for d in dict.fromkeys((dtype, torch.float32))]
            if verdict := weakest(cases):
                return rest, style, verdict
    name = getattr(function, "__name__", repr(function))
    raise Left("rotary", f"{name}({', '.join(parameters)}) is none of the rotations of ops.apply_rope")


def _match(
    function: Callable[..., Any], style: Style, rest: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> Match | None:
    ours = _replacement(style, rest, "torch")
    options: list[dict[str, Any]] = [{}]
    if "unsqueeze_dim" in rest:
        options += [{"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}]
    if "position_ids" in rest:
        options += [{"position_ids": torch.tensor([[4, 3, 2, 1, 0]], device=device)}]
    verdicts: list[Match | None] = []
    with probing(device):
        for batch, rotated, option in ((b, r, o) for b in (2, 1) for r in (16, 8) for o in options):
            shape = (2, 4, 5, 16) if option.get("unsqueeze_dim") != 2 else (2, 5, 4, 16)
            q, k = torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
            k = k[:, :2] if option.get("unsqueeze_dim") != 2 else k[:, :, :2]
            angle = 6 * torch.rand(batch, 5, rotated // 2, device=device)
            cos, sin = (torch.cat((t, t), dim=-1).to(dtype) for t in (angle.cos(), angle.sin()))
            try:
                verdicts.append(compare("rotary", function, ours, q, k, cos, sin, **option))
            except Left:
                if rotated == 16:
                    raise  # only a function that cannot rotate a part of the row may refuse to
    return weakest(verdicts)


def _complex_match(function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Match | None:
    ours = _replacement("complex", (), "torch")
    verdicts: list[Match | None] = []
    with probing(device):
        for batch in (2, 1):
            q, k = (torch.randn(2, heads, 5, 16, device=device, dtype=dtype) for heads in (4, 1))
            table = torch.polar(
                torch.rand(batch, 5, 8, device=device) + 0.5, 6 * torch.rand(batch, 5, 8, device=device)
            )
            verdicts.append(compare("rotary", function, ours, q, k, table))
    return weakest(verdicts)
