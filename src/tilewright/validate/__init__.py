"""Proof that an op is right: `check` runs it in every execution mode against a float64 oracle.

    >>> from tilewright.validate import check
    >>> print(check("rms_norm", "llama8b_train", backend="triton"))
    >>> check("rms_norm").require()          # every edge case; raises VerificationError with the report

No op is named in this package: all is read from contracts.
"""

from tilewright.validate.checking import check
from tilewright.validate.modes import MODES
from tilewright.validate.report import CheckReport, Result

__all__ = ["MODES", "CheckReport", "Result", "check"]
