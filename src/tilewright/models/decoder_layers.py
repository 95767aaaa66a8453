"""The residual add after attention and the norm that follows it, as one `ops.add_rms_norm`.

    h = x + attention(norm1(x));   y = h + mlp(norm2(h))

is the layer of Llama and most of its descendants.  Unfused, h is written by the add and read again by norm2; fused, both results leave
one kernel that reads its inputs once.  Whether a layer has this structure is asked of the layer: its children are replaced by small
recording functions and its own forward must give, bit for bit, the sum above, and must hand attention the arguments that our
forward would.  A layer with four norms (Gemma 2 and 3) or a scaled residual (Granite) does not, and is left.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.norms import RmsNormRecipe
from tilewright.models.specialise import Recipe
from tilewright.models.stand_in import Left, Proposal, call, match, obstacle, placement, probing, stand_in

_WIDTH = 16


@dataclass(frozen=True)
class AddNormRecipe:
    """`names` are the parameters of the layer's forward after the hidden states that it hands on to attention, with defaults."""

    norm1: str
    attention: str
    norm2: str
    mlp: str
    recipe2: RmsNormRecipe
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, hidden_states, ...) with the original's order of arguments -> hidden states (B, S, H)."""
        norm1, attention, norm2, mlp = self.norm1, self.attention, self.norm2, self.mlp
        names, defaults, second, backend = self.names, self.defaults, self.recipe2, self.backend

        def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            options = {**dict(defaults), **dict(zip(names, args, strict=False)), **kwargs}
            attended = getattr(self, attention)(hidden_states=getattr(self, norm1)(hidden_states), **options)[0]
            norm = getattr(self, norm2)
            normed, residual = ops.add_rms_norm(
                attended,
                hidden_states,
                getattr(norm, second.weight),
                eps=getattr(norm, second.eps),
                offset=second.offset,
                fp32_weight=second.fp32_weight,
                backend=backend,
            )
            return residual + getattr(self, mlp)(normed)

        return forward

    def __str__(self) -> str:
        return f"ops.add_rms_norm: the add after {self.attention} with {self.norm2}"


def find(module: nn.Module, recipes: Mapping[nn.Module, Recipe], backend: str | None) -> Proposal | None:
    """The fused layer this module can be, or None if it has fewer than two norms of its own.  Raises Left if it cannot."""
    norms = {n: r for n, m in module._modules.items() if m is not None and isinstance(r := recipes.get(m), RmsNormRecipe)}
    blocks = [n for n, m in module._modules.items() if m is not None and n not in norms and any(True for _ in m.parameters())]
    if len(norms) < 2 or not blocks:
        return None
    if len(norms) != 2 or len(blocks) != 2:
        raise Left("add_norm", f"has {len(norms)} norms around {len(blocks)} blocks, not norm, attention, norm, MLP")
    if reason := obstacle(module):
        raise Left("add_norm", reason)
    if dropout := next((n for n, m in module._modules.items() if isinstance(m, nn.Dropout) and m.p > 0), None):
        raise Left("add_norm", f"{dropout} drops part of the residual stream")
    for norm1, norm2 in itertools.permutations(norms):
        for attention, mlp in itertools.permutations(blocks):
            if recipe := _recipe(module, norm1, attention, norm2, mlp, norms[norm2]):
                norm = module._modules[norm2]
                assert norm is not None
                if norm._forward_hooks or norm._forward_pre_hooks:
                    raise Left("add_norm", f"{norm2} has hooks, which a fused call would skip")
                final = AddNormRecipe(**{**vars(recipe), "backend": backend})
                return Proposal("add_norm", final, ("add_rms_norm",), f"{final} (bitwise)")
    raise Left("add_norm", "does not compute x + attention(norm(x)), then h + mlp(norm(h))")


class _Attention(nn.Module):
    """Stands for attention: a fixed elementwise function that remembers the keyword arguments it was given."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope
        self.seen: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.seen = kwargs
        return torch.tanh(hidden_states * self.slope), None


class _Mlp(nn.Module):
    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.slope)


def _recipe(
    module: nn.Module, norm1: str, attention: str, norm2: str, mlp: str, recipe2: RmsNormRecipe
) -> AddNormRecipe | None:
    """The recipe for these roles if it reproduces the layer, for every way of passing the arguments."""
    _, first, *rest = inspect.signature(type(module).forward).parameters.values()
    named = [p for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    device, own = placement(module)
    for dtype in dict.fromkeys((own, torch.float32)):
        with probing(device):
            layer = _probe_layer(module, (norm1, norm2), attention, mlp, device, dtype)
            x = torch.randn(2, 3, _WIDTH, device=device, dtype=dtype)
            values = {p.name: object() for p in named}
            extra = {"tilewright_probe": object()} if any(p.kind is p.VAR_KEYWORD for p in rest) else {}
            expected, seen = _run(module, layer, attention, x, **values, **extra)
            handed_on = tuple(p.name for p in named if seen.get(p.name) is values[p.name])
            defaults = tuple((p.name, p.default) for p in named if p.name in handed_on and p.default is not p.empty)
            recipe = AddNormRecipe(norm1, attention, norm2, mlp, recipe2, handed_on, defaults, "torch")
            if handed_on != tuple(p.name for p in named) or seen != {**values, **extra}:
                return None
            ours = recipe.build(type(module))
            styles: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {**values, **extra}), (tuple(values.values()), {})]
            if len(defaults) == len(named):
                styles.append(((), {}))
            for args, kwargs in styles:
                expected, seen = _run(module, layer, attention, x, *args, **kwargs)
                got = call("add_norm", ours, layer, x, *args, **kwargs)
                stub = layer._modules[attention]
                assert isinstance(stub, _Attention)
                if not isinstance(expected, Tensor) or match(got, expected) != "bitwise" or stub.seen != seen:
                    return None
    return recipe


def _probe_layer(
    module: nn.Module, norms: tuple[str, str], attention: str, mlp: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    children: dict[str, nn.Module] = {
        attention: _Attention(torch.randn(_WIDTH, device=device, dtype=dtype)),
        mlp: _Mlp(torch.randn(_WIDTH, device=device, dtype=dtype)),
    }
    for name in norms:
        norm = module._modules[name]
        assert norm is not None
        weights = {n: torch.randn(_WIDTH, device=device, dtype=dtype) for n, p in norm._parameters.items() if p is not None}
        children[name] = stand_in(norm, parameters=weights)
    return stand_in(module, children=children)


def _run(module: nn.Module, layer: nn.Module, attention: str, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The layer's own forward, and what it handed to attention."""
    stub = layer._modules[attention]
    assert isinstance(stub, _Attention)
    stub.seen = {}
    try:
        return type(module).forward(layer, *args, **kwargs), dict(stub.seen)
    except (TypeError, ValueError, AttributeError):  # the wrong assignment of roles: the MLP's stub was called as attention
        return None, {}
