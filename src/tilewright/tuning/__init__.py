"""The tuner: find the fastest backend and configuration of an op by trying them, where none of them can do harm.

    >>> from tilewright.tuning import tune
    >>> print(tune("rms_norm", budget=300.0))

Search spaces stand beside each implementation (`register_impl(..., candidates=)`).  A candidate is compiled, checked
and timed in worker processes on tensors of their own: one that is wrong, hangs or crashes costs its worker and is
recorded with its reason.  What is faster than the present choice by more than the noise goes into the user's tuning
table, which dispatch reads.  Nothing here knows an op by name.
"""

from tilewright.tuning.report import Report, Tuned
from tilewright.tuning.run import tune

__all__ = ["Report", "Tuned", "tune"]
