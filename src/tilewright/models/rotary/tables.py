"""The rotary tables that a model passes to its attention: how columns repeat, and in which dtype.

The same rotation function means different things for different tables: `q * cos + rotate_half(q) * sin` is a rotation
only if column i + R/2 of cos repeats column i. So the model's own rotary module is run once, on a few positions, and
the layout is read from its result.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.models.stand_in import NotReplaceable, call, placement, probing, stand_in

# halves    (.., R), column i + R/2 repeats column i (Llama and most others)
# pairs     (.., R), column 2i + 1 repeats column 2i (Cohere)
# once      (.., R/2), one column for each pair of elements (GPT-OSS)
# complex   (.., R/2), cos + i sin (DeepSeek-V2)
Layout = Literal["halves", "pairs", "once", "complex"]
Tables = frozenset[tuple[Layout, torch.dtype]]


def tables(model: nn.Module) -> dict[str, Tables]:
    """Path of every rotary module of `model`, and the tables it makes."""
    if not any(True for _ in model.parameters()):
        return {}
    _, dtype = placement(model)
    layouts = {
        path: frozenset(_layouts(module, dtype))
        for path, module in model.named_modules()
        if "rotary" in type(module).__name__.lower() and not list(module.parameters())
    }
    return {path: pairs for path, pairs in layouts.items() if pairs}


def nearest(path: str, by_path: dict[str, Tables]) -> Tables:
    """The tables of those rotary modules whose path shares the longest prefix with `path`."""
    shared = {other: _shared(path, other) for other in by_path}
    best = max(shared.values(), default=0)
    return frozenset().union(*(by_path[other] for other, depth in shared.items() if depth == best))


def example(layout: Layout, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random tables for `shape` (.., R/2) pairs: (cos, sin), or (table,) for the complex layout."""
    angle = 6 * torch.rand(shape, device=device)
    if layout == "complex":
        return (torch.polar(torch.rand_like(angle) + 0.5, angle),)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if layout == "halves":
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if layout == "pairs":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return cos, sin


def _layouts(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[Layout, torch.dtype]]:
    forward = inspect.getattr_static(type(module), "forward", None)
    names = list(inspect.signature(forward).parameters)[1:] if inspect.isfunction(forward) else []
    kinds: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
        ("x", "position_ids"): [()],
        ("x", "position_ids", "layer_type"): [(kind,) for kind in getattr(module, "layer_types", ())],
    }
    device = next((b.device for b in module.buffers()), torch.device("cpu"))
    for extra in kinds.get(tuple(names), []):
        if (table := _table(module, dtype, device, extra)) is not None and (layout := _layout(table)):
            yield layout, (table[0] if isinstance(table, tuple) else table).dtype


def _table(module: nn.Module, dtype: torch.dtype, device: torch.device, extra: tuple[Any, ...]) -> Any:
    """What a rotary module makes for four positions (B, S), or (3, B, S) as M-RoPE has them; None where it fails."""
    with probing(device):
        x = torch.zeros(1, 4, 8, device=device, dtype=dtype)
        positions = torch.tensor([[1, 2, 3, 7]], device=device)
        for each in (positions, positions.expand(3, -1, -1)):
            try:
                return call("rotary", type(module).forward, stand_in(module), x, each, *extra)
            except NotReplaceable:
                continue
    return None


def _layout(table: Any) -> Layout | None:
    if isinstance(table, Tensor) and table.is_complex():
        return "complex"
    if not (isinstance(table, tuple) and len(table) == 2 and all(isinstance(t, Tensor) for t in table)):
        return None
    half = table[0].shape[-1] // 2
    if all(torch.equal(t[..., :half], t[..., half:]) for t in table):
        return "halves"
    return "pairs" if all(torch.equal(t[..., ::2], t[..., 1::2]) for t in table) else "once"


def _shared(path: str, other: str) -> int:
    pairs = zip(path.split("."), other.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
