"""Rotary embedding: the function an attention module calls, replaced by `ops.apply_rope` for that module alone.

Model code calls a function of its own file, such as `apply_rotary_pos_emb`, from inside attention's forward.
Rebinding that name in the file would change every model of the family in the process. Instead the instance's class
gets a copy of forward with its own copy of the globals, in which this one name is ours; the original function and its
file are not touched. A function is replaced only after it reproduced, on random q, k, cos and sin, one of the styles
below; each style is one way to call `ops.apply_rope`, or, on a table that brings norms with it, `ops.qk_norm_rope`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.rotary.tables import Layout, Tables, example
from tilewright.models.stand_in import Match, NotReplaceable, Proposal, obstacle, placement, probing, run_both, weakest

# Pairs of elements (i, i + R/2):
#   half          the table repeats its first half (Llama)
#   half_once     the table has one column for each pair (GPT-OSS)
# Pairs (2i, 2i + 1):
#   interleaved   the table repeats its first half (GLM)
#   repeated      the table repeats each column (Cohere)
#   complex       one complex table instead of cos and sin (DeepSeek-V2)
#   to_halves     the result is all first elements of pairs, then all second ones (DeepSeek-V3)
# Pairs (i, i + R/2) of packed sequences, (T, H, D):
#   packed        in float32 whatever the dtypes (vision towers of Qwen-VL and GLM-4V)
_WIDTH = 16  # head dim of the probe
Style = Literal["half", "half_once", "interleaved", "repeated", "complex", "to_halves", "packed"]
_STYLES: dict[Layout, tuple[Style, ...]] = {
    "halves": ("half", "interleaved", "to_halves", "packed"),
    "pairs": ("repeated",),
    "once": ("half_once",),
    "complex": ("complex",),
}


class NormedTable(NamedTuple):
    """A table of cosines, and the norms that q and k have still to go through: their weights and options."""

    cos: Tensor
    q_weight: Tensor
    k_weight: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class RotaryRecipe:
    """Attention's own forward with global functions replaced: (name, style, names of the arguments after the table)."""

    functions: tuple[tuple[str, Style, tuple[str, ...]], ...]
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """A copy of `cls.forward` that sees our functions under the old names."""
        forward = inspect.getattr_static(cls, "forward")
        names = dict(forward.__globals__)
        # With a __name__, torch.compile reads globals from that module, which still has the original function.
        del names["__name__"]
        for name, style, rest in self.functions:
            names[name] = _replacement(style, rest, self.backend, forward.__globals__[name])
        copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        copied.__module__ = forward.__module__
        copied.__qualname__ = forward.__qualname__
        return copied

    def __str__(self) -> str:
        return ", ".join(f"{name} -> ops.apply_rope ({style})" for name, style, _ in self.functions)


def find(module: nn.Module, tables: Tables, backend: str | None) -> Proposal | None:
    """Propose the rotary functions that forward calls; None if it calls none.

    Raises NotReplaceable for one we cannot reproduce.

    tables: what the model's rotary module makes; empty where it has none, then Llama's form is assumed.
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    if not inspect.isfunction(forward) or not (names := _rotary_names(inspect.unwrap(forward))):
        return None
    if not list(module.parameters()):
        return None
    if forward is not inspect.unwrap(forward):
        raise NotReplaceable("rotary", "its forward is wrapped by a decorator")
    if reason := obstacle(module):
        raise NotReplaceable("rotary", reason)
    device, dtype = placement(module)
    tables = tables or frozenset({("halves", dtype)})
    functions: list[tuple[str, Style, tuple[str, ...]]] = []
    verdicts: list[Match | None] = []
    for name in names:
        rest, style, verdict = _style(forward.__globals__[name], tables, device, dtype)
        functions.append((name, style, rest))
        verdicts.append(verdict)
    recipe = RotaryRecipe(tuple(functions), backend)
    return Proposal("rotary", recipe, ("apply_rope",), f"{recipe} ({weakest(verdicts)})")


def _rotary_names(forward: Any) -> list[str]:
    """Global functions that forward calls and that are named like rotary embeddings; `_style` checks what they do."""
    return [
        name
        for name in forward.__code__.co_names
        if ("rotary" in name or "rope" in name)
        and callable(forward.__globals__.get(name))
        and not isinstance(forward.__globals__[name], type)
    ]


def _replacement(
    style: Style, rest: tuple[str, ...], backend: str | None, original: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function with the original's parameters that rotates by `ops.apply_rope`."""

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor | NormedTable, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rope: Callable[..., tuple[Tensor, Tensor]] = functools.partial(ops.apply_rope, backend=backend)
        if isinstance(cos, NormedTable):
            cos, *weights, options = cos
            norms = dict(zip(("q_weight", "k_weight"), weights, strict=True)) | options
            rope = functools.partial(ops.qk_norm_rope, **norms, backend=backend)
        elif stays_with_torch("apply_rope", q, backend) or (style == "packed" and (q.dim() != 3 or cos.dim() != 2)):
            result: tuple[Tensor, Tensor] = original(q, k, cos, sin, *args, **kwargs)
            return result
        if style == "packed":
            return rope(q, k, cos=cos.float(), sin=sin.float())
        heads_dim = {**dict(zip(rest, args, strict=False)), **kwargs}.get("unsqueeze_dim", 1)
        if heads_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if style == "half":
            q, k = rope(q, k, cos=cos, sin=sin)
        elif style == "half_once":
            q, k = rope(q, k, cos=cos, sin=sin, rotary_dim=2 * cos.shape[-1])
        elif style == "interleaved":
            q, k = rope(q, k, cos=cos, sin=sin, interleaved=True)
        elif style == "repeated":
            width = cos.shape[-1]
            cos, sin = cos[..., ::2], sin[..., ::2]
            q, k = rope(q, k, cos=cos, sin=sin, interleaved=True, rotary_dim=width)
        else:
            q, k = rope(_halves(q), _halves(k), cos=cos, sin=sin)
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads_dim == 2 else (q, k)

    def rotate_complex(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        width = 2 * table.shape[-1]
        return ops.apply_rope(q, k, table.real, table.imag, interleaved=True, rotary_dim=width, backend=backend)

    return rotate_complex if style == "complex" else rotate


def _halves(x: Tensor) -> Tensor:
    """(..., D) with pairs (2i, 2i + 1) -> the same pairs at (i, i + D/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@functools.cache
def _style(
    function: Callable[..., Any], tables: Tables, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], Style, Match]:
    """Names of the arguments after the table, and the style that reproduces `function` in every case it accepts."""
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except ValueError as error:
        raise NotReplaceable("rotary", f"{function!r} has no readable signature") from error
    layouts = {layout for layout, _ in tables}
    leading = 3 if layouts == {"complex"} else 4
    rest = parameters[leading:]
    if len(parameters) >= leading and set(rest) <= {"unsqueeze_dim", "position_ids"}:
        cases = {(layout, dtype, table_dtype) for layout, table_dtype in tables}
        cases |= {(layout, torch.float32, torch.float32) for layout in layouts}
        failure: NotReplaceable | None = None
        for style in _STYLES[min(layouts)]:
            ours = _replacement(style, rest, "torch", function)
            match = _match_packed if style == "packed" else _match
            try:
                verdicts = [match(function, ours, rest, layout, device, *dtypes) for layout, *dtypes in cases]
            except NotReplaceable as error:
                failure = failure or error
                continue
            if verdict := weakest(verdicts):
                return rest, style, verdict
        if failure is not None:
            raise failure
    name = getattr(function, "__name__", repr(function))
    raise NotReplaceable("rotary", f"{name}({', '.join(parameters)}) is none of the rotations of ops.apply_rope")


def _match(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    rest: tuple[str, ...],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> Match | None:
    """Compare with tables of B and of 1, with full and partial rotation, and with every optional argument."""
    options: list[dict[str, Any]] = [{}]
    if "unsqueeze_dim" in rest:
        options += [{"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}]
    if "position_ids" in rest:
        options += [{"position_ids": torch.tensor([[4, 3, 2, 1, 0]], device=device)}]
    verdicts: list[Match | None] = []
    with probing(device):
        for batch, rotated, option in itertools.product((2, 1), (_WIDTH, _WIDTH // 2), options):
            q, k = (torch.randn(2, heads, 5, _WIDTH, device=device, dtype=dtype) for heads in (4, 1))
            if option.get("unsqueeze_dim") == 2:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            table = example(layout, (batch, 5, rotated // 2), device, table_dtype)
            try:
                verdicts.append(run_both("rotary", theirs, ours, q, k, *table, **option))
            except NotReplaceable:
                if rotated == _WIDTH:
                    raise  # a function may refuse partial rotation only
    return weakest(verdicts)


def _match_packed(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    rest: tuple[str, ...],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> Match | None:
    """Compare on one packed sequence, of which each token has its row of the table."""
    if rest:
        return None
    with probing(device):
        q, k = (torch.randn(5, heads, _WIDTH, device=device, dtype=dtype) for heads in (4, 1))
        table = example(layout, (5, _WIDTH // 2), device, table_dtype)
        return run_both("rotary", theirs, ours, q, k, *table)
