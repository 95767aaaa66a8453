"""What can be done to a model: one file a change, in the order of their stages."""

from collections.abc import Sequence

from tilewright.assistant.changes.cast import BF16, FP32_ON_CPU
from tilewright.assistant.changes.compiled_decode import CompiledDecode
from tilewright.assistant.changes.gated_gate_up import GATED_GATE_UP
from tilewright.assistant.changes.merged_linear import MERGED_GATE_UP, MERGED_QKV
from tilewright.assistant.changes.op_replacement import OpReplacement
from tilewright.assistant.changes.protocol import Applied, Budgeted, Change, ProcessWide, Scene, Verdict
from tilewright.assistant.changes.quantised_linears import QUANTISED
from tilewright.assistant.changes.regional_compile import RegionalCompile
from tilewright.assistant.changes.static_decode import StaticDecode
from tilewright.assistant.changes.tuned_ops import TunedOps
from tilewright.errors import InputError

__all__ = [
    "Applied",
    "Budgeted",
    "Change",
    "ProcessWide",
    "Scene",
    "TunedOps",
    "Verdict",
    "catalogue",
    "chosen",
]


def catalogue() -> tuple[Change, ...]:
    """Every change this version knows."""
    return (
        StaticDecode(),
        BF16,
        FP32_ON_CPU,
        OpReplacement(),
        MERGED_QKV,
        MERGED_GATE_UP,
        TunedOps(),
        GATED_GATE_UP,
        CompiledDecode(),
        RegionalCompile(),
    )


def chosen(allow: Sequence[str] | None) -> tuple[Change, ...]:
    """The changes named in `allow`; None means all of the catalogue, without formats of fewer bits."""
    if allow is None:
        return catalogue()
    changes: tuple[Change, ...] = (*catalogue(), *QUANTISED)
    unknown = sorted(set(allow) - {change.name for change in changes})
    if unknown:
        raise InputError(
            f"allow: {', '.join(unknown)} is not known. Allowed: {', '.join(change.name for change in changes)}."
        )
    return tuple(change for change in changes if change.name in allow)
