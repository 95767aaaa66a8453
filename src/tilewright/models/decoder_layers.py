"""The residual add after attention and the norm that follows it, as one `ops.add_rms_norm`.

    h = x + attention(norm1(x));   y = h + mlp(norm2(h))

is the layer of Llama and most of its descendants. Unfused, h is written by the add and read again by norm2; fused,
one kernel reads its inputs once and writes both results. A probe finds out whether a layer has this structure: small
recording functions take the place of its children, and the layer's own forward must then give, bit for bit, the sum
above, and must pass attention the arguments that our forward would. Both branches may be multiplied by one number of
the layer before they are added (Granite). A layer with four norms (Gemma 2 and 3) is another, and is left.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.norms import RmsNormRecipe
from tilewright.models.specialise import Recipe, rename_argument
from tilewright.models.stand_in import NotReplaceable, Proposal, call, match, obstacle, placement, probing, stand_in

_WIDTH = 16
_PLAIN = (type(None), bool, int, float, str)  # defaults that a recipe, which is hashed and pickled, may carry


@dataclass(frozen=True)
class AddNormRecipe:
    """The layer's children by role, and how its forward passes arguments."""

    norm1: str
    attention: str
    norm2: str
    mlp: str
    second: RmsNormRecipe  # the recipe of norm2
    argument: str  # the forward's first parameter, the hidden states
    names: tuple[str, ...]  # the parameters after it, all passed on to attention
    defaults: tuple[tuple[str, Any], ...]  # the defaults of those parameters that have one
    keyword: str | None  # the name by which attention gets the hidden states; None: by position
    multiplier: str | None  # of what attention and MLP return, an attribute of the layer
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, hidden_states, ...) with the original's order of arguments -> hidden states (B, S, H)."""
        norm1, attention, norm2, mlp = self.norm1, self.attention, self.norm2, self.mlp
        names, defaults, second, backend = self.names, dict(self.defaults), self.second, self.backend
        keyword, multiplier = self.keyword, self.multiplier

        def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if stays_with_torch("rms_norm", x, backend):
                unfused: Tensor = cls.forward(self, x, *args, **kwargs)
                return unfused
            options = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            normed = getattr(self, norm1)(x)
            if keyword is None:
                attended = getattr(self, attention)(normed, **options)[0]
            else:
                attended = getattr(self, attention)(**{keyword: normed}, **options)[0]
            if multiplier is not None:
                attended = attended * getattr(self, multiplier)
            if attended.dtype != x.dtype:  # under autocast, where the layer's own sum promotes
                common = torch.promote_types(attended.dtype, x.dtype)
                attended, x = attended.to(common), x.to(common)
            norm = getattr(self, norm2)
            normed, residual = ops.add_rms_norm(
                attended,
                x,
                None if second.weight is None else getattr(norm, second.weight),
                eps=getattr(norm, second.eps),
                offset=second.offset,
                fp32_weight=second.fp32_weight,
                backend=backend,
            )
            inner: Tensor = getattr(self, mlp)(normed)
            return residual + (inner if multiplier is None else inner * getattr(self, multiplier))

        return rename_argument(forward, "x", self.argument)

    def __str__(self) -> str:
        times = "" if self.multiplier is None else f" * {self.multiplier}"
        return f"ops.add_rms_norm: the add after {self.attention}{times} with {self.norm2}"


def find(module: nn.Module, recipes: Mapping[nn.Module, Recipe], backend: str | None) -> Proposal | None:
    """Propose a layer of two blocks with norms; None for other modules.

    Raises NotReplaceable if it cannot be fused.
    """
    norms = {
        n: r
        for n, m in module._modules.items()
        if m is not None and isinstance(r := recipes.get(m), RmsNormRecipe) and not r.one_dtype
    }
    blocks = [
        n for n, m in module._modules.items() if m is not None and n not in norms and any(True for _ in m.parameters())
    ]
    if len(norms) < 2 or len(blocks) != 2:
        return None
    if len(norms) != 2:
        raise NotReplaceable(
            "add_norm", f"has {len(norms)} norms around two blocks, where one add and one norm meet only with two"
        )
    if reason := obstacle(module):
        raise NotReplaceable("add_norm", reason)
    if dropout := next((n for n, m in module._modules.items() if isinstance(m, nn.Dropout) and m.p > 0), None):
        raise NotReplaceable("add_norm", f"{dropout} drops part of the residual stream")
    numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
    for multiplier in (*numbers, None):
        for (norm1, norm2), (attention, mlp) in itertools.product(
            itertools.permutations(norms), itertools.permutations(blocks)
        ):
            if recipe := _recipe(module, norm1, attention, norm2, mlp, norms[norm2], multiplier):
                norm = module._modules[norm2]
                assert norm is not None
                if norm._forward_hooks or norm._forward_pre_hooks:
                    raise NotReplaceable("add_norm", f"{norm2} has hooks, which a fused call would skip")
                final = dataclasses.replace(recipe, backend=backend)
                return Proposal("add_norm", final, ("add_rms_norm",), f"{final} (bitwise)")
    raise NotReplaceable("add_norm", "does not compute h = x + attention(norm(x)), then h + mlp(norm(h))")


class _Attention(nn.Module):
    """Stands for attention: a fixed elementwise function that remembers how it was called."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope
        self.keyword: str | None = None
        self.received: dict[str, Any] = {}

    def forward(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.keyword = None if args else next(iter(kwargs))
        x = args[0] if self.keyword is None else kwargs.pop(self.keyword)
        self.received = kwargs
        return torch.tanh(x * self.slope), None


class _Mlp(nn.Module):
    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.slope)


def _recipe(
    module: nn.Module,
    norm1: str,
    attention: str,
    norm2: str,
    mlp: str,
    second: RmsNormRecipe,
    multiplier: str | None,
) -> AddNormRecipe | None:
    """The recipe for these roles, if it reproduces the layer in every way of passing its arguments."""
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    if not parameters or parameters[0].kind is not parameters[0].POSITIONAL_OR_KEYWORD:
        return None
    first, *rest = parameters
    named = [p for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    values = {p.name: object() for p in named}
    extra = {"tilewright_probe": object()} if any(p.kind is p.VAR_KEYWORD for p in rest) else {}
    defaults = tuple((p.name, p.default) for p in named if p.default is not p.empty)
    if not all(isinstance(value, _PLAIN) for _, value in defaults):
        return None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {**values, **extra}), (tuple(values.values()), {})]
    if len(defaults) == len(named):
        calls.append(((), {}))

    recipe = None
    device, own_dtype = placement(module)
    cases = itertools.product(dict.fromkeys((own_dtype, torch.float32)), (False, True), calls)
    for dtype, training, (args, kwargs) in cases:
        with probing(device):
            stub = _Attention(torch.randn(_WIDTH, device=device, dtype=dtype))
            children = {attention: stub, mlp: _Mlp(torch.randn(_WIDTH, device=device, dtype=dtype))}
            children |= {norm: _small_norm(module, norm, device, dtype) for norm in (norm1, norm2)}
            layer = stand_in(module, children=children).train(training)  # a functional dropout must not be lost
            if multiplier is not None:
                vars(layer)[multiplier] = 0.7  # 1 would hide where it multiplies
            x = torch.randn(2, 3, _WIDTH, device=device, dtype=dtype)
            try:
                expected = call("add_norm", type(module).forward, layer, x, *args, **kwargs)
            except NotReplaceable:
                return None  # the roles are wrong: the MLP's stub was called as attention
            received, keyword = stub.received, stub.keyword
            recipe = AddNormRecipe(
                norm1, attention, norm2, mlp, second, first.name, tuple(values), defaults, keyword, multiplier, "torch"
            )
            got = call("add_norm", recipe.build(type(module)), layer, x, *args, **kwargs)
            if match(got, expected) != "bitwise" or stub.received != received or stub.keyword != keyword:
                return None
    return recipe


def _small_norm(layer: nn.Module, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    norm = layer._modules[name]
    assert norm is not None
    weights = {n: torch.randn(_WIDTH, device=device, dtype=dtype) for n, p in norm._parameters.items() if p is not None}
    return stand_in(norm, parameters=weights)
