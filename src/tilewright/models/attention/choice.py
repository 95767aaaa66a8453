"""Choose the attention a model runs: one name in its configuration, which transformers looks up on every call.

    ops.fmha   on a GPU whose tables hold sizes with this model's heads that a kernel of ours won (each call looks up
               its own size); or on the backend that `patch(backend=)` names
    SDPA       instead of eager attention, everywhere else

transformers builds masks for padding and windows from the configured name and passes dropout on, so all three keep
their meaning.  SDPA ignores logit soft-capping and sinks, `ops.fmha` applies them.  So a model that attends eagerly
because of them may move to `ops.fmha` but not to SDPA; one that already runs SDPA, and so loses them, stays there:
`ops.fmha` would change its results.

The configuration object may be shared with other models, so the patched model gets its own copy and `undo` gives the
shared one back.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewright.dispatch import contract
from tilewright.errors import BackendError
from tilewright.models.attention import interface, measured
from tilewright.models.attention.refused import REFUSED
from tilewright.models.report import Row
from tilewright.models.stand_in import serving_device, takes_unmeasured
from tilewright.models.wide import dominant_dtype
from tilewright.ops.attention.bucket import SINKS, SOFTCAP

_IGNORED_BY_SDPA = {"softcap": ("logit soft-capping", SOFTCAP), "s_aux": ("attention sinks", SINKS)}
"""Arguments that transformers' sdpa path accepts and ignores: meaning, and flag of `ops.fmha`."""
_PROBED = 16  # queries and keys of the call that is planned, not run, to learn whether a backend takes it


@dataclass(frozen=True)
class Rebinding:
    """One attribute of one module that refers to the configuration."""

    module: nn.Module
    name: str
    old: Any
    new: Any

    def apply(self) -> None:
        """Point the attribute at the patched model's own configuration."""
        self.module.__dict__[self.name] = self.new

    def undo(self) -> None:
        """Point it back at the original object."""
        self.module.__dict__[self.name] = self.old


def switch(
    model: nn.Module, allowed: bool, backend: str | None = None, *, training: bool = False
) -> tuple[Row | None, list[Rebinding]]:
    """The row of the report (None for a model without a configured attention), and the attributes to rebind.

    training: dropout will run, which kernels of `ops.fmha` do not have.
    """
    config = getattr(model, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if current is None:
        return None, []
    name, lost = type(model).__name__, lost_by_sdpa(model)
    dropout = _dropout(model) if training else 0.0
    ours, why_not = _choose_fmha(model, current, backend, dropout) if allowed else (None, "")
    if ours is not None:
        return Row("", name, "attention", "replaced", ours[1]), list(_rebindings(model, config, ours[0]))
    if current != "eager":
        remark = f"; transformers ignores its {' and '.join(lost)} there" if lost and current == "sdpa" else ""
        return Row("", name, "attention", "left", f"already runs {current!r}{remark}{why_not}"), []
    reason = None
    if not allowed:
        reason = "not in ops="
    elif lost:
        reason = f"runs eagerly for its {' and '.join(lost)}, which SDPA ignores"
    elif not all(m._supports_sdpa for m in model.modules() if hasattr(m, "_supports_sdpa")):
        reason = "the model class does not support SDPA"
    elif getattr(config, "output_attentions", False):
        reason = "the configuration asks for attention weights, which SDPA does not return"
    if reason:
        return Row("", name, "attention", "left", reason + why_not), []
    text = f"SDPA instead of eager{why_not}"
    return Row("", name, "attention", "replaced", text), list(_rebindings(model, config, "sdpa"))


def lost_by_sdpa(model: nn.Module) -> list[str]:
    """The features that the model's attention passes and SDPA ignores, in words."""
    return sorted(meaning for word, (meaning, _) in _IGNORED_BY_SDPA.items() if word in _passed(model))


def _choose_fmha(
    model: nn.Module, current: str, backend: str | None, dropout: float
) -> tuple[tuple[str, str] | None, str]:
    """((registered name, text of the report), ""), or (None, why not); the reason is empty for an automatic choice."""
    layers = list(_attention_layers(model))
    if backend in (None, "auto"):
        device = serving_device(next((p.device for p in model.parameters()), torch.device("cpu")))
        if not layers or _why_not_fmha(model, current, layers):
            return None, ""
        if takes_unmeasured() and device.type == "cuda":
            return (interface.register_attention(), f"ops.fmha instead of {current}, to be measured"), ""
        extras = sum(bit for word, (_, bit) in _IGNORED_BY_SDPA.items() if word in _passed(model))
        configs = {id(c): c for layer in layers if (c := getattr(layer, "config", None)) is not None}.values()
        sizes = sum(measured.won(c, dominant_dtype(model), device, extras) for c in configs)
        if not sizes:
            return None, ""
        text = f"ops.fmha where it was measured faster (sizes with these heads: {sizes}), else {current} as before"
        if dropout:
            text += f", which also does the dropout of {dropout:g} in training"
        interface.register_attention()
        return (interface.MEASURED, text), ""
    if backend == "torch":
        return None, ""  # SDPA is torch's attention
    if not layers:
        return None, f"; ops.fmha[{backend}] does not take it: its layers do not ask transformers' registry"
    if dropout:
        return (
            None,
            f"; ops.fmha[{backend}] does not take it: it drops weights with probability {dropout:g} in training",
        )
    if reason := _why_not_fmha(model, current, layers) or _why_not_on_backend(model, backend):
        return None, f"; ops.fmha[{backend}] does not take it: {reason}"
    interface.register_attention()
    return (interface.register_backend(backend), f"ops.fmha[{backend}] instead of {current}"), ""


def _why_not_fmha(model: nn.Module, current: str, layers: list[nn.Module]) -> str | None:
    """Why `ops.fmha` would not compute what the model computes now, on any backend; None if it would."""
    if current not in ("eager", "sdpa"):
        return f"it runs {current!r}"
    passed = _passed(model)
    refused = [what for word, what in REFUSED.items() if word in passed]
    if refused:
        return f"it passes {' and '.join(refused)}"
    if getattr(model.config, "output_attentions", False):
        return "the configuration asks for attention weights"
    lost = lost_by_sdpa(model)
    if current == "sdpa" and lost:
        return f"SDPA ignores its {' and '.join(lost)}, ops.fmha would not"
    for module in model.modules():
        if hasattr(module, "_supports_sdpa") and not (module._supports_sdpa or lost):
            return f"{type(module).__name__} supports no other attention than its own"
    if any(interface.eager_of(layer) is None for layer in layers):
        return "its eager attention is not beside its layers"
    return None


def _why_not_on_backend(model: nn.Module, backend: str) -> str | None:
    """Why `backend` cannot run heads of this model over a few keys; None if it can."""
    raw_op = contract("fmha").forward
    parameter = next(model.parameters())
    for config in {id(c): c for layer in _attention_layers(model) if (c := getattr(layer, "config", None))}.values():
        shape = measured.heads_of(config)
        if shape is None:
            continue
        group, d, d_v = shape
        dtype = dominant_dtype(model)
        q, k, v = (
            torch.empty(1, heads, _PROBED, width, device=parameter.device, dtype=dtype)
            for heads, width in ((group, d), (1, d), (1, d_v))
        )
        try:
            raw_op.plan((q, k, v, None, None, None, "", -1, 0, 1.0, 0.0), f"{backend}!", "default")
        except BackendError as error:
            return str(error)
    return None


def _dropout(model: nn.Module) -> float:
    """The largest probability of dropout in an attention layer of the model, in training."""
    members = (
        member
        for layer in _attention_layers(model)
        for name, member in (*vars(layer).items(), *layer._modules.items())
        if name in ("attention_dropout", "attn_dropout")
    )
    rates = (member.p if isinstance(member, nn.Dropout) else member for member in members)
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that look their attention up in transformers' registry."""
    for module in model.modules():
        code = _forward_code(module)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield module


def _passed(model: nn.Module) -> set[object]:
    """String constants in the forwards of attention layers: the names of the keyword arguments are among them."""
    codes = {code for layer in _attention_layers(model) if (code := _forward_code(layer)) is not None}
    return {word for code in codes for constant in code.co_consts for word in _words(constant)}


def _forward_code(module: nn.Module) -> Any:
    forward = inspect.getattr_static(type(module), "forward", None)
    return inspect.unwrap(forward).__code__ if inspect.isfunction(forward) else None


def _words(constant: object) -> tuple[object, ...]:
    return constant if isinstance(constant, tuple) else (constant,)


def _rebindings(model: nn.Module, config: Any, name: str) -> Iterator[Rebinding]:
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)  # fills `copies` with every nested configuration too
    copies[id(config)]._attn_implementation = name
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if id(value) in copies and hasattr(value, "_attn_implementation"):
                yield Rebinding(module, attribute, value, copies[id(value)])
