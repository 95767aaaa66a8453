"""The ways an op is run, one file for each kind of question.  Importing this package fills `MODES`."""

from tilewright.validate.modes import (  # noqa: I001 - cheap and telling modes run first
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
