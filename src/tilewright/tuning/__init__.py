"""The tuner: find the fastest backend and configuration of an op by trying them in worker processes.

    >>> from tilewright.tuning import tune, tune_model
    >>> print(tune("rms_norm", budget=300.0))     # an op's declared workloads
    >>> print(tune_model(model, budget=300.0))    # the sizes that a model runs

Each implementation declares its search space (`register_impl(..., candidates=)`).  A candidate is compiled, checked and
timed in worker processes on the tuner's own tensors: one that hangs or crashes costs a worker, and every rejected one
is recorded with its reason.  A choice that beats the present one by more than the noise goes into the user's tuning
table, which dispatch reads.  No op is named in this package: all is read from contracts.
"""

from typing import TYPE_CHECKING, Any

from tilewright.tuning.report import Report, Tuned
from tilewright.tuning.run import tune

if TYPE_CHECKING:
    from tilewright.tuning.model import tune_model

__all__ = ["Report", "Tuned", "tune", "tune_model"]


def __getattr__(name: str) -> Any:
    """`tune_model`, imported when it is asked for: a worker needs nothing of models."""
    if name != "tune_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tilewright.tuning.model import tune_model

    return tune_model
