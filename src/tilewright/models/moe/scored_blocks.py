"""Blocks of experts that multiply a token by its score before its experts, as Llama 4: only the chosen ones run here.

The model's own code gives every expert all tokens, those that did not choose it multiplied by 0.  A block holds a
router, a linear layer that returns scores (T, E), 0 for experts that were not chosen, and logits; one module of
experts, w1 (E, H, 2 I) and w2 (E, I, H); and an MLP that every token takes.  Whether it computes this is tried on a
stand-in.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.moe import experts
from tilewright.models.specialise import rename_argument
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    obstacle,
    only_argument,
    placement,
    probing,
    run_both,
    stand_in,
    weakest,
)

_INNER, _TOKENS = 4, 9  # of the stand-in


@dataclass(frozen=True)
class ScoredBlockRecipe:
    """The chosen experts of tokens times their scores by `ops.fused_moe_bias`, and the MLP of every token."""

    experts: str
    router: str
    shared: str
    w1: str
    w2: str
    k: int
    activation: Literal["silu", "gelu"]
    argument: str
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> (T, H), logits (T, E)."""
        k, activation, backend = self.k, self.activation, self.backend
        names = self.experts, self.router, self.shared

        def block(self: nn.Module, x: Tensor) -> Any:
            held, router, shared = (getattr(self, name) for name in names)
            first, second = getattr(held, recipe.w1), getattr(held, recipe.w2)
            if x.dtype != first.dtype or stays_with_torch("fused_moe", x, backend):
                return cls.forward(self, x)
            x = x.reshape(-1, first.shape[1])
            scores, logits = router(x)
            chosen, ids = torch.topk(scores, k, dim=-1)
            rows = (x[:, None] * chosen[..., None]).flatten(0, 1)  # (T * k, H)
            ones = torch.ones(rows.shape[0], 1, dtype=torch.float32, device=x.device)
            y = ops.fused_moe_bias(
                rows, first.mT, second.mT, ones, ids.reshape(-1, 1), activation=activation, backend=backend
            )
            return shared(x) + y.view(-1, k, x.shape[1]).sum(1), logits

        recipe = self
        return rename_argument(block, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.fused_moe_bias, {self.activation}, {self.k} experts of tokens times their scores"


class _Copy(nn.Module):
    """In place of the MLP of every token."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose such a block; None if the module's children are others.

    Raises NotReplaceable if only the children fit.
    """
    base = _children(module)
    if base is None:
        return None
    if reason := obstacle(module):
        raise NotReplaceable("experts", reason)
    for activation in ("silu", "gelu"):
        recipe = dataclasses.replace(base, activation=activation)
        if verdict := _reproduces(module, recipe):
            text = f"{recipe} ({verdict})"
            return Proposal("experts", dataclasses.replace(recipe, backend=backend), ("fused_moe_bias",), text)
    raise NotReplaceable("experts", "do not run on tokens times their scores, with SiLU or GELU, beside one MLP")


def _children(module: nn.Module) -> ScoredBlockRecipe | None:
    """The names of children and weights, and k, which is tried: the fewest scores of a token that are not 0."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    held = [name for name, child in children.items() if experts.holds_experts(child)]
    argument = only_argument(module)
    if len(children) != 3 or len(held) != 1 or argument is None or module._parameters:
        return None
    stacks = {name: p for name, p in children[held[0]]._parameters.items() if p is not None}
    for w1, w2 in (tuple(stacks), tuple(stacks)[::-1]) if len(stacks) == 2 else ():
        count, width, columns = stacks[w1].shape
        routers = [
            name for name, child in children.items()
            if isinstance(child, nn.Linear) and (child.in_features, child.out_features) == (width, count)
        ]  # fmt: skip
        if tuple(stacks[w2].shape) == (count, columns // 2, width) and len(routers) == 1 and columns % 2 == 0:
            (shared,) = children.keys() - {held[0], routers[0]}
            k = getattr(children[routers[0]], "top_k", 1)
            if isinstance(k, int) and 1 <= k <= count:
                return ScoredBlockRecipe(held[0], routers[0], shared, w1, w2, k, "silu", argument, "torch")
    return None


def _reproduces(module: nn.Module, recipe: ScoredBlockRecipe) -> Match | None:
    """Compare on a CPU, with narrow experts."""
    forward, device = recipe.build(type(module)), torch.device("cpu")
    held, router = getattr(module, recipe.experts), getattr(module, recipe.router)
    count, width, _ = getattr(held, recipe.w1).shape
    verdicts: list[Match | None] = []
    for dtype in dict.fromkeys((placement(module)[1], torch.float32)):
        with probing(device):
            weights = {
                recipe.w1: (torch.randn(count, width, 2 * _INNER) * width**-0.5).to(dtype),
                recipe.w2: torch.randn(count, _INNER, width).to(dtype),
            }
            linear = {name: torch.randn(p.shape).to(dtype) for name, p in router._parameters.items() if p is not None}
            children = {
                recipe.experts: stand_in(held, parameters=weights),
                recipe.router: stand_in(router, parameters=linear),
                recipe.shared: _Copy(),
            }
            clone = stand_in(module, children=children)
            x = torch.randn(1, _TOKENS, width).to(dtype)
            verdicts.append(run_both("experts", type(module).forward, forward, clone, x))
    return weakest(verdicts)
