"""What docstrings say of backends is what the contract lists."""

import re

import pytest

import tilewright.ops  # noqa: F401  (binds the contracts)
from tilewright.dispatch import contract, contracts
from tilewright.dispatch.registry import listed_kernels

NAMES = [name for name in contracts() if not name.startswith("test_")]


def listed(name: str) -> set[str] | None:
    """The backends that the docstring lists, here or in the op whose words it takes over; None where it lists none."""
    text = " ".join((contract(name).function.__doc__ or "").split())
    if found := re.search(r"exactly this backend \(([^)]*)\)", text):
        return set(re.findall(r'"(\w+)"', found[1]))
    if found := re.search(r"backend: as in `(\w+)`", text):
        return listed(found[1])
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_lists_the_backends_there_are(name: str) -> None:
    assert listed(name) in (None, {*listed_kernels(name), "torch"})


def test_most_docstrings_list_theirs() -> None:
    assert sum(listed(name) is not None for name in NAMES) > len(NAMES) / 2
