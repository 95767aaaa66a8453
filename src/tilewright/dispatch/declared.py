"""Contracts of all ops, of which those that nobody has used yet are imported here.  See `tilewright.catalogue`."""

from tilewright import catalogue
from tilewright.dispatch import contract as imported
from tilewright.dispatch.contract import Contract
from tilewright.errors import InputError


def contracts() -> dict[str, Contract]:
    """Contracts of every op by name, in alphabetical order: after `import tilewright.ops` all of ours, and those that
    other packages registered.
    """
    catalogue.load_all()
    return imported.contracts()


def contract(name: str) -> Contract:
    """The contract of one op.  Raises InputError naming the ops that exist."""
    catalogue.load(name)
    try:
        return imported.contract(name)
    except InputError:
        catalogue.load_all()  # which the message names
        return imported.contract(name)
