"""Attention stays PyTorch's scaled dot product attention: a model that runs it eagerly is switched to "sdpa".

transformers builds masks for padding and windows from the configured implementation and passes dropout on, so the
switch is one configuration value and all three keep their meaning. The configuration object may be shared with other
models, so the patched model gets its own copy and `undo` gives the shared one back.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilewright.models.report import Row

# What transformers' sdpa path accepts and does not apply.
_IGNORED_BY_SDPA = {"softcap": "logit soft-capping", "s_aux": "attention sinks"}


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


def switch(model: nn.Module, allowed: bool) -> tuple[Row | None, list[Rebinding]]:
    """The row for the report (None for a model without a configured attention), and what to rebind."""
    config = getattr(model, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if current is None:
        return None, []
    name = type(model).__name__
    lost = sorted({meaning for module in model.modules() for meaning in _lost_by_sdpa(module)})
    if current != "eager":
        remark = f"; transformers ignores its {' and '.join(lost)} there" if lost and current == "sdpa" else ""
        return Row("", name, "attention", "left", f"already runs {current!r}{remark}"), []
    reason = None
    if not allowed:
        reason = "not in ops="
    elif not all(m._supports_sdpa for m in model.modules() if hasattr(m, "_supports_sdpa")):
        reason = "the model class does not support SDPA"
    elif lost:
        reason = f"runs eagerly for its {' and '.join(lost)}, which SDPA ignores"
    elif getattr(config, "output_attentions", False):
        reason = "the configuration asks for attention weights, which SDPA does not return"
    if reason:
        return Row("", name, "attention", "left", reason), []
    return Row("", name, "attention", "replaced", "SDPA instead of eager"), list(_rebindings(model, config))


def _rebindings(model: nn.Module, config: Any) -> Iterator[Rebinding]:
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)  # fills `copies` with every nested configuration too
    copies[id(config)]._attn_implementation = "sdpa"
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies and hasattr(value, "_attn_implementation"):
                yield Rebinding(module, name, value, copies[id(value)])


def _lost_by_sdpa(module: nn.Module) -> Iterator[str]:
    forward = inspect.getattr_static(type(module), "forward", None)
    if inspect.isfunction(forward) and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names:
        passed = {word for constant in forward.__code__.co_consts for word in _words(constant)}
        yield from (meaning for keyword, meaning in _IGNORED_BY_SDPA.items() if keyword in passed)


def _words(constant: object) -> tuple[object, ...]:
    return constant if isinstance(constant, tuple) else (constant,)
