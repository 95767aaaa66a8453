"""The norms of queries and keys with the rotation that follows them, as one `ops.qk_norm_rope`.

    q = q_norm(q_proj(x));   k = k_norm(k_proj(x));   q, k = apply_rotary_pos_emb(q, k, cos, sin)

is what attention of Qwen3, Gemma 3 and their descendants begins with.  Apart, q and k are read and written twice;
fused, once.  Attention's forward stays its own code: in a copy of it the norms are another attribute, which returns its
argument, and the table of cosines that the caller passes brings the norms' weights along, to the rotation that
`functions` put into the copy.  A stand-in runs both ways before anything is replaced, so a layer that norms and does
not rotate (every fourth of Exaone 4), one that rotates first, and one whose norm spans all heads (OLMo 2) are left.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.norms import RmsNormRecipe
from tilewright.models.rotary.functions import NormedTable, RotaryRecipe, Style
from tilewright.models.rotary.tables import Layout, example
from tilewright.models.specialise import Patched, Recipe, specialise
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    call,
    placement,
    probing,
    run_both,
    stand_in,
    weakest,
)

_TABLES = "position_embeddings"  # (cos, sin): the argument of attention in every model of transformers
_WIDTH = 16  # of the hidden states of the probe
_LAYOUTS: dict[Style, Layout] = {"half": "halves", "interleaved": "halves", "half_once": "once", "repeated": "pairs"}


@dataclass(frozen=True)
class QkNormRotaryRecipe:
    """Attention's own forward with its norms in the rotation."""

    rotary: RotaryRecipe
    q_norm: str
    k_norm: str
    norm: RmsNormRecipe  # of both
    place: int  # of the tables among the arguments
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """A forward with the parameters of `cls.forward`."""
        unfused = self.rotary.build(cls)
        fused = _without_calls(unfused, (self.q_norm, self.k_norm))
        q_norm, k_norm, norm, place, backend = self.q_norm, self.k_norm, self.norm, self.place, self.backend
        weight = norm.weight
        assert weight is not None

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tables = args[place] if place < len(args) else kwargs.get(_TABLES)
            if tables is None or stays_with_torch("qk_norm_rope", tables[0], backend):
                return unfused(self, *args, **kwargs)
            first, second = getattr(self, q_norm), getattr(self, k_norm)
            options = {"eps": getattr(first, norm.eps), "offset": norm.offset, "fp32_weight": norm.fp32_weight}
            cos, sin = tables
            normed = NormedTable(cos, getattr(first, weight), getattr(second, weight), options), sin
            if place < len(args):
                return fused(self, *args[:place], normed, *args[place + 1 :], **kwargs)
            return fused(self, *args, **{**kwargs, _TABLES: normed})

        return forward

    def __str__(self) -> str:
        ((name, style, _),) = self.rotary.functions
        return f"{self.q_norm}, {self.k_norm}, {name} -> ops.qk_norm_rope ({style})"


def _without_calls(forward: Callable[..., Any], children: tuple[str, ...]) -> Callable[..., Any]:
    """A copy of `forward` in which these children of its module return their argument."""
    assert isinstance(forward, FunctionType)
    code, as_is = forward.__code__, Patched.tilewright_as_is.__name__
    names = tuple(as_is if name in children else name for name in code.co_names)
    code = code.replace(co_names=names)
    copied = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def find(
    module: nn.Module, rotary: RotaryRecipe, recipes: Mapping[nn.Module, Recipe], backend: str | None
) -> Proposal | None:
    """Propose what `rotary` and the recipes of two norms compute apart; None where that cannot be fused."""
    norms = [n for n, m in module._modules.items() if m is not None and isinstance(recipes.get(m), RmsNormRecipe)]
    if len(norms) != 2 or len(rotary.functions) != 1 or rotary.functions[0][1] not in _LAYOUTS:
        return None
    first, second = (getattr(module, name) for name in norms)
    recipe = recipes[first]
    assert isinstance(recipe, RmsNormRecipe)
    if recipe.weight is None:
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (first, second))
    same = recipe == recipes[second] and getattr(first, recipe.eps) == getattr(second, recipe.eps)
    if hooked or not same or recipe.one_dtype:
        return None
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    place = next((i for i, p in enumerate(parameters) if p.name == _TABLES), None)
    if place is None:
        return None
    for q_norm, k_norm in itertools.permutations(norms):
        fused = QkNormRotaryRecipe(replace(rotary, backend="torch"), q_norm, k_norm, recipe, place, "torch")
        if verdict := _reproduces(module, fused):
            fused = replace(fused, rotary=rotary, backend=backend)
            return Proposal("rotary", fused, ("qk_norm_rope",), f"{fused} ({verdict})")
    return None


class _Projection(nn.Module):
    """Stands for a linear layer of hidden states: a fixed function of as many features.  Passes other input on."""

    def __init__(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.slope = torch.randn(layer.out_features, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x[..., :1] * self.slope + x[..., 1:2]) if x.shape[-1] == _WIDTH else x


class _Cache:
    """Stands for a cache of keys and values, which must not be handed the norms."""

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nested = [v for a in (*args, *kwargs.values()) if isinstance(a, dict) for v in a.values()]
        if any(isinstance(a, NormedTable) for a in (*args, *kwargs.values(), *nested)):
            raise NotReplaceable("rotary", "its cache takes the tables")
        return k, v


def _reproduces(module: nn.Module, fused: QkNormRotaryRecipe) -> Match | None:
    """Compare on tables of B and of 1, passed by place and by name, with a cache and without."""
    device, dtype = placement(module)
    ((_, style, _),) = fused.rotary.functions
    parameters = inspect.signature(type(module).forward).parameters
    required = [
        n for n, p in list(parameters.items())[2:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    verdicts: list[Match | None] = []
    with probing(device):
        children: dict[str, nn.Module] = {}
        for name, child in module._modules.items():
            if name in (fused.q_norm, fused.k_norm) and child is not None:
                weights = {n: torch.randn_like(p) for n, p in child._parameters.items() if p is not None}
                children[name] = stand_in(child, parameters=weights)
            elif isinstance(child, nn.Linear):
                children[name] = _Projection(child, device, dtype)
            elif child is not None and any(True for _ in child.parameters()):
                return None
        clone = stand_in(module, children=children).eval()  # a dropout would differ from run to run
        clone.__class__ = specialise(type(module), fused)
        d = next(p for p in children[fused.q_norm].parameters()).numel()
        x = torch.randn(2, 5, _WIDTH, device=device, dtype=dtype)
        unfused = fused.rotary.build(type(module))
        for batch, cache in ((2, None), (1, _Cache())):
            tables = example(_LAYOUTS[style], (batch, 5, d // 2), device, dtype)
            options: dict[str, Any] = {name: None for name in required if name != _TABLES}
            options |= {"past_key_values": cache} if "past_key_values" in parameters else {}
            by_place = fused.place == 1 and cache is None
            call_args = (clone, x, tables) if by_place else (clone, x)
            options |= {} if by_place else {_TABLES: tables}
            try:
                expected = partial(_attended, unfused, *call_args, **options)
                got = partial(call, "rotary", _attended, type(clone).forward, *call_args, **options)
                verdicts.append(run_both("rotary", expected, got))
            except NotReplaceable:
                return None  # what cannot be fused stays as `functions` proposed it
    return weakest(verdicts)


def _attended(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The first result of attention, without the weights."""
    return forward(*args, **kwargs)[0]
