"""The execution modes of an op, one file for each kind of question.  Importing this package fills `MODES`."""

from tilewright.validate.modes import (  # noqa: I001 - the order of runs: cheap modes that find the most come first
    accuracy,
    autograd,
    layout,
    memory,
    repetition,
    refusals,
    streams,
    registration,
    compiled,
)
from tilewright.validate.modes.registry import MODES, Mode

__all__ = [
    "MODES",
    "Mode",
    "accuracy",
    "autograd",
    "compiled",
    "layout",
    "memory",
    "refusals",
    "registration",
    "repetition",
    "streams",
]
