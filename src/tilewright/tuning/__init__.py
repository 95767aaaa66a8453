"""The tuner: find the fastest backend and configuration of an op by trying them in worker processes.

    >>> from tilewright.tuning import tune
    >>> print(tune("rms_norm", budget=300.0))

Each implementation declares its search space (`register_impl(..., candidates=)`).  A candidate is compiled, checked and
timed in worker processes on the tuner's own tensors: one that hangs or crashes costs a worker, and every rejected one
is recorded with its reason.  A choice that beats the present one by more than the noise goes into the user's tuning
table, which dispatch reads.  No op is named in this package: all is read from contracts.
"""

from tilewright.tuning.report import Report, Tuned
from tilewright.tuning.run import tune

__all__ = ["Report", "Tuned", "tune"]
