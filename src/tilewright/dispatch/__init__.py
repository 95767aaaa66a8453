"""Which implementation of an op runs: contracts, registration, preferences, measured tables, selection, explanation."""

from tilewright import catalogue
from tilewright.dispatch.call import call, call_in_place, dispatch, register
from tilewright.dispatch.contract import (
    BadInput,
    Contract,
    Cost,
    Gradient,
    Promises,
    Sample,
    Workload,
)
from tilewright.dispatch.contract import contract as _imported_contract
from tilewright.dispatch.contract import contracts as _imported_contracts
from tilewright.dispatch.explanation import Explanation, explain
from tilewright.dispatch.preference import get_current_backend, numerics, set_backend, use_backend
from tilewright.dispatch.raw import RawOp
from tilewright.dispatch.recording import Recording, record
from tilewright.dispatch.registry import (
    Implementation,
    implementations,
    register_impl,
    register_kernel,
    unregister_impl,
)
from tilewright.dispatch.select import Plan

__all__ = [
    "BadInput",
    "Contract",
    "Cost",
    "Explanation",
    "Gradient",
    "Implementation",
    "Plan",
    "Promises",
    "RawOp",
    "Recording",
    "Sample",
    "Workload",
    "call",
    "call_in_place",
    "contract",
    "contracts",
    "dispatch",
    "explain",
    "get_current_backend",
    "implementations",
    "numerics",
    "record",
    "register",
    "register_impl",
    "register_kernel",
    "set_backend",
    "unregister_impl",
    "use_backend",
]


def contracts() -> dict[str, Contract]:
    """Contracts of every op by name, in alphabetical order: after `import tilewright.ops` all of ours, used or not, and
    those that other packages registered.
    """
    catalogue.load_all()
    return _imported_contracts()


def contract(name: str) -> Contract:
    """The contract of one op.  Raises InputError naming the ops that exist."""
    catalogue.load(name)
    return _imported_contract(name)
