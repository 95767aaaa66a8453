"""Decide what of a model is replaced, in four steps that each read what the one before wrote.

1. Every finder proposes a recipe for every module, or says why the module is left.
2. In float8, an MLP whose three linear layers may all run in float8 is proposed as a whole.
3. A decoder layer whose norms were recognised is proposed as one residual add and norm; attention that rotates what its
   own norms return, as norms and rotation in one.
4. Each module gets the first proposal that the caller allows; every proposal becomes a row of the report.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from tilewright.dispatch import contract
from tilewright.models import (
    decoder_layers,
    fp8_linears,
    gated_norms,
    linears,
    mlps,
    norms,
)
from tilewright.models.moe import experts, routers, scored_blocks
from tilewright.models.report import Row
from tilewright.models.rotary import functions, qk_norms
from tilewright.models.rotary import tables as rotary_tables
from tilewright.models.stand_in import NotReplaceable, Proposal
from tilewright.models.training import losses
from tilewright.models.training.head import LossRecipe

Mode = Literal["inference", "train"]
Proposals = dict[nn.Module, list[Proposal | NotReplaceable]]


@dataclass(frozen=True)
class Plan:
    """Rows of the report, in the order of `model.named_modules()`, and the proposal of each module to replace."""

    rows: list[Row]
    chosen: dict[nn.Module, Proposal]


def plan(model: nn.Module, mode: Mode, allowed: frozenset[str], backend: str | None, fp8: bool) -> Plan:
    """Probe every module of `model` and choose; nothing is replaced yet.   allowed: names of ops."""
    heads = fp8_linears.heads(model) if fp8 else None
    proposals = _propose(model, mode, heads, backend)
    merged = frozenset[nn.Module]() if heads is None else _merge_fp8_mlps(proposals, allowed, backend)
    _propose_fused_norms(proposals, allowed, backend)
    return _choose(model, proposals, merged, mode, allowed)


def _propose(model: nn.Module, mode: Mode, heads: frozenset[nn.Module] | None, backend: str | None) -> Proposals:
    """Step 1.   heads: linear layers that float8 leaves; None: nothing runs in float8."""
    tables = rotary_tables.tables(model)
    proposals: Proposals = {}
    for path, module in model.named_modules():
        answers = _ask(partial(norms.find, backend=backend), module)
        answers += _ask(partial(gated_norms.find, backend=backend), module)
        answers += _ask(partial(mlps.find, backend=backend), module)
        answers += _ask(partial(experts.find, backend=backend), module)
        answers += _ask(partial(scored_blocks.find, backend=backend), module)
        answers += _ask(partial(routers.find, backend=backend), module)
        if mode == "train":
            answers += _ask(partial(losses.find, backend=backend), module)
        fp8: list[Proposal | NotReplaceable] = []
        if heads is not None:
            fp8 = _ask(partial(fp8_linears.find, heads=heads, backend=backend), module)
        answers += fp8
        if not any(isinstance(answer, Proposal) for answer in fp8):
            answers += _ask(partial(linears.find, backend=backend), module)
        nearest = rotary_tables.nearest(path, tables)
        answers += _ask(partial(functions.find, tables=nearest, backend=backend), module)
        proposals[module] = answers
    return proposals


def _merge_fp8_mlps(proposals: Proposals, allowed: frozenset[str], backend: str | None) -> frozenset[nn.Module]:
    """Step 2: put the float8 MLP in place of an MLP in `proposals`.  Returns the linear layers that it contains."""
    layers = {module for module, answers in proposals.items() if _proposal(answers, "fp8") is not None}
    merged: set[nn.Module] = set()
    for module, answers in proposals.items():
        mlp = _proposal(answers, "mlp")
        if mlp is None:
            continue
        fp8_mlp = fp8_linears.find_mlp(module, mlp.recipe, allowed.issuperset(mlp.ops), layers, backend)
        if fp8_mlp is not None:
            answers[answers.index(mlp)] = fp8_mlp
            merged |= {layer for layer in module.children() if layer in layers}
    return frozenset(merged)


def _propose_fused_norms(proposals: Proposals, allowed: frozenset[str], backend: str | None) -> None:
    """Step 3: append to `proposals` what decoder layers can fuse, given the recipes of their norms, and put rotations
    with the norms before them in place of rotations alone.
    """
    recipes = {m: p.recipe for m, answers in proposals.items() for p in answers if isinstance(p, Proposal)}
    for module, answers in proposals.items():
        answers += _ask(partial(decoder_layers.find, recipes=recipes, backend=backend), module)
        alone = _proposal(answers, "rotary") if "qk_norm_rope" in allowed else None
        if alone is not None and isinstance(alone.recipe, functions.RotaryRecipe):
            fused = qk_norms.find(module, alone.recipe, recipes, backend)
            if fused is not None:
                answers[answers.index(alone)] = fused


def _choose(
    model: nn.Module, proposals: Proposals, merged: frozenset[nn.Module], mode: Mode, allowed: frozenset[str]
) -> Plan:
    """Step 4.   merged: layers that a float8 MLP contains."""
    rows: list[Row] = []
    chosen: dict[nn.Module, Proposal] = {}
    fused_norms: dict[nn.Module, str] = {}  # a layer comes before its norms in `named_modules`
    for path, module in model.named_modules():
        row = partial(Row, path, type(module).__name__)
        if module in merged:
            rows.append(row("fp8", "replaced", "within its MLP's float8 products"))
            continue
        for answer in proposals[module]:
            if isinstance(answer, NotReplaceable):
                rows.append(row(answer.kind, "left", str(answer)))
            elif why_not := _why_not(answer, mode, allowed):
                rows.append(row(answer.kind, "left", why_not))
            elif module in chosen:
                rows.append(row(answer.kind, "left", "something else in this module was replaced"))
            else:
                chosen[module] = answer
                rows.append(row(answer.kind, "replaced", answer.text + fused_norms.get(module, "")))
                if isinstance(answer.recipe, decoder_layers.AddNormRecipe):
                    fused_norms[getattr(module, answer.recipe.norm2)] = ", within its layer's ops.add_rms_norm"
                if isinstance(answer.recipe, qk_norms.QkNormRotaryRecipe):
                    for norm in (answer.recipe.q_norm, answer.recipe.k_norm):
                        fused_norms[getattr(module, norm)] = ", within its attention's ops.qk_norm_rope"
                if isinstance(answer.recipe, LossRecipe):  # a model comes before its head, which nothing else takes
                    proposals[getattr(module, answer.recipe.head)] = [losses.HEAD]
    return Plan(rows, chosen)


def _why_not(proposal: Proposal, mode: Mode, allowed: frozenset[str]) -> str | None:
    """Why the caller's arguments exclude a proposal; None if they allow it."""
    if proposal.kind == "fp8":
        return None
    if not allowed.issuperset(proposal.ops):
        return f"ops.{proposal.ops[0]} is not in ops="
    if mode == "train" and proposal.kind == "linear":
        return "F.linear computes whatever a gradient is wanted of"
    if mode == "train" and (fixed := [op for op in proposal.ops if contract(op).gradient is None]):
        return f"ops.{fixed[0]} has no gradient"
    return None


def _ask(find: Callable[[nn.Module], Proposal | None], module: nn.Module) -> list[Proposal | NotReplaceable]:
    """The finder's answer as a list: empty where the module is of another kind."""
    try:
        proposal = find(module)
    except NotReplaceable as left:
        return [left]
    return [] if proposal is None else [proposal]


def _proposal(answers: list[Proposal | NotReplaceable], kind: str) -> Proposal | None:
    return next((answer for answer in answers if isinstance(answer, Proposal) and answer.kind == kind), None)
