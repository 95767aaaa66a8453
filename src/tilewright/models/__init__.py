"""Patching models: `patch(model)` replaces what our ops compute, verifies it, and can undo it."""

from tilewright.models.agreement import Agreement, Comparison
from tilewright.models.attention import register_attention
from tilewright.models.patching import Patch, patch
from tilewright.models.quantise import quantize_
from tilewright.models.report import Report, Row
from tilewright.models.training.comparison import LossComparison
from tilewright.models.verification import Verification

__all__ = [
    "Agreement",
    "Comparison",
    "LossComparison",
    "Patch",
    "Report",
    "Row",
    "Verification",
    "patch",
    "quantize_",
    "register_attention",
]
