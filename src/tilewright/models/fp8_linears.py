"""Linear layers and SwiGLU MLPs of a model in float8, for inference: the replacements of `patch(model, fp8=True)`.

A layer casts x with one scale for 128 elements of a row, and its weight once with one scale for each 128x128 block.
An MLP down(silu(gate(x)) * up(x)) runs gate and up as one GEMM with interleaved rows, whose epilogue applies SwiGLU and
casts the result for down: x is cast once, and the activation between takes one byte an element.

Left as they are: the head, whose rounding no later layer averages out; layers with fewer than 512 inputs or outputs
(routers, adapters, classifier heads), whose weights are read in the time of a launch; and sizes that are no multiple of
16, which tensor cores do not read in float8.  Calls that need a gradient run as before.

The weights stay: state_dict is what it was, undo is exact, and the float8 copies cost half as much again of bf16.
Where memory matters, `nn.FP8Linear.from_linear(layer, frozen=True)` keeps no other copy.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.dispatch.derivatives import level_is_open
from tilewright.models.mlps import GatedMlpRecipe
from tilewright.models.specialise import Recipe, origin, rename_argument, specialise
from tilewright.models.stand_in import NotReplaceable, Proposal, obstacle
from tilewright.nn.fp8_linear import fp8_linear, result_dtype
from tilewright.nn.weight_casts import Cast, WeightCasts
from tilewright.ops.gemm.scaled_matmul import scaled_matmul
from tilewright.ops.gemm.scaled_matmul_fp8 import scaled_matmul_fp8
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

CASTS = "tilewright_fp8"
"""The attribute in which a replaced module holds its float8 weights."""
SMALLEST = 512  # features
_UNIT = 16  # features: 16 bytes, the alignment that TMA needs
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = frozenset((Tensor, FakeTensor))


@dataclass(frozen=True)
class Fp8LinearRecipe:
    """x @ weight.T + bias of an nn.Linear."""

    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, input) -> (..., N)."""
        backend = self.backend

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            if not _runs(self, input):
                return F.linear(input, self.weight, self.bias)
            return fp8_linear(input, _cast(self, "weight", [self.weight]), self.bias, result_dtype(input), backend)

        return forward

    def prepare(self, module: nn.Module) -> None:
        """Cast the weight now."""
        _cast(module, "weight", [module.weight])  # type: ignore[list-item]

    def __str__(self) -> str:
        return "float8, 1x128 of x, 128x128 of the weight"


@dataclass(frozen=True)
class Fp8MlpRecipe:
    """down(silu(gate(x)) * up(x)) in two products; `unfused` is the recipe for calls that need a gradient, if any."""

    gate: str
    up: str
    down: str
    argument: str
    unfused: Recipe | None
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        backend = self.backend
        unfused: Callable[..., Any] = cls.forward if self.unfused is None else self.unfused.build(cls)
        roles = self.gate, self.up, self.down

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            gate, up, down = (getattr(self, role) for role in roles)
            if not (all(type(m) is nn.Linear for m in (gate, up, down)) and _runs(self, x)):  # or an adapter was added
                y: Tensor = unfused(self, x)
                return y
            q, scales = per_token_cast_to_fp8(x.detach().reshape(-1, x.shape[-1]))
            pair, last = _cast(self, "pair", [gate.weight, up.weight]), _cast(self, "down", [down.weight])
            bias = None if gate.bias is None else _interleaved([gate.bias, up.bias])
            inner, inner_scales = scaled_matmul_fp8(
                q, pair[0], scales, pair[1], bias=bias, activation="swiglu", trans_b=True, backend=backend
            )
            y = scaled_matmul(
                inner,
                last[0],
                inner_scales,
                last[1],
                bias=down.bias,
                trans_b=True,
                out_dtype=result_dtype(x),
                backend=backend,
            )
            return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

        return rename_argument(forward, "x", self.argument)

    def prepare(self, module: nn.Module) -> None:
        """Cast the weights now."""
        gate, up, down = (getattr(module, role).weight for role in (self.gate, self.up, self.down))
        _cast(module, "pair", [gate, up])
        _cast(module, "down", [down])

    def __str__(self) -> str:
        return f"float8, {self.gate} and {self.up} as one product that gates and casts its own columns"


Fp8Recipe = Fp8LinearRecipe | Fp8MlpRecipe


def heads(model: nn.Module) -> frozenset[nn.Module]:
    """The layer that computes the logits, and layers that share a weight with an embedding."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = {m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in embedded}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return frozenset(layers | {head} if isinstance(head, nn.Module) else layers)


def find(module: nn.Module, heads: frozenset[nn.Module], backend: str | None) -> Proposal | None:
    """Propose an nn.Linear of plain floats; None for other modules.

    Raises NotReplaceable for a layer that stays as it is.
    """
    if getattr(type(module), "forward", None) is not nn.Linear.forward:
        return None
    assert isinstance(module, nn.Linear)
    weight: Any = module.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.dtype not in _FLOATS:
        return None
    if module in heads:
        raise NotReplaceable("fp8", "the head of a model stays as it is")
    n, k = weight.shape
    if min(n, k) < SMALLEST:
        raise NotReplaceable("fp8", f"{k} inputs and {n} outputs; below {SMALLEST} a layer stays as it is")
    if n % _UNIT or k % _UNIT:
        raise NotReplaceable("fp8", f"{k} inputs and {n} outputs are not multiples of {_UNIT}, as float8 products need")
    if reason := obstacle(module):
        raise NotReplaceable("fp8", reason)
    recipe = Fp8LinearRecipe(backend)
    return Proposal("fp8", recipe, ("scaled_matmul",), str(recipe))


def find_mlp(
    module: nn.Module, recipe: Recipe | None, with_unfused: bool, layers: Collection[nn.Module], backend: str | None
) -> Proposal | None:
    """Propose the SwiGLU MLP of `recipe` as a whole, if all its linears are in `layers`, which `find` proposed.

    with_unfused: calls that need a gradient run `recipe`, else the module's own forward.
    """
    if not isinstance(recipe, GatedMlpRecipe) or recipe.activation != "silu":
        return None
    gate, up, down = (getattr(module, role) for role in (recipe.gate, recipe.up, recipe.down))
    if any(type(m) is not nn.Linear or m not in layers or _hooked(m) for m in (gate, up, down)):
        return None
    if (gate.bias is None) != (up.bias is None) or gate.weight.dtype != up.weight.dtype:
        return None
    fp8_recipe = Fp8MlpRecipe(
        recipe.gate, recipe.up, recipe.down, recipe.argument, recipe if with_unfused else None, backend
    )
    return Proposal("fp8", fp8_recipe, ("scaled_matmul_fp8", "scaled_matmul"), str(fp8_recipe))


def prepare(module: nn.Module) -> None:
    """Cast the weights of a replaced module now: a CUDA graph may capture the first call."""
    _recipe_of(type(module)).prepare(module)


def in_torch(generated: type[nn.Module]) -> type[nn.Module]:
    """The class of a replaced module with torch's products in place of our kernels."""
    return specialise(origin(generated)[0], dataclasses.replace(_recipe_of(generated), backend="torch"))


def _recipe_of(generated: type[nn.Module]) -> Fp8Recipe:
    recipe = origin(generated)[1]
    assert isinstance(recipe, Fp8LinearRecipe | Fp8MlpRecipe)
    return recipe


def _hooked(module: nn.Module) -> bool:
    """True if the layer has hooks, which a fused product of two layers would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _runs(module: nn.Module, x: Tensor) -> bool:
    """True for calls that run in float8.  Gradients, tangents, vectors and tensor subclasses keep torch's forward."""
    if type(x) not in _PLAIN or x.dim() < 2 or x.dtype not in _FLOATS or level_is_open():
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())))


def _cast(module: nn.Module, name: str, weights: Sequence[Tensor]) -> Cast:
    casts = vars(module).get(CASTS)
    if casts is None:  # a copied or unpickled module has none yet
        casts = vars(module)[CASTS] = WeightCasts()

    if torch.compiler.is_compiling():
        return casts.last(name) or _cast_rows(*[w.detach() for w in weights])
    cast: Cast = casts.of(name, weights, _cast_rows)
    return cast


def _cast_rows(*parts: Tensor) -> Cast:
    return per_block_cast_to_fp8(parts[0] if len(parts) == 1 else _interleaved(parts))


def _interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Row 0 of each, row 1 of each, ...: the layout that a gated epilogue reads."""
    return torch.stack(list(parts), 1).flatten(0, 1)
