"""A registry of one's own: what a test registers under a real backend's name must not replace the real one for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts, implementations, registry


@contextmanager
def own_registry() -> Iterator[None]:
    """Registrations inside the block end with it; those from before are there again."""
    # A kernel's module registers itself once: one that the block imported, and replaced, would be lost
    for contract in contracts().values():
        for raw in contract.raw_ops:
            implementations(raw.op, raw.direction)
    before = {
        key: {backend: list(stack) for backend, stack in found.items()}
        for key, found in registry._implementations.items()
    }
    try:
        yield
    finally:
        registry._implementations.clear()
        registry._implementations.update(before)
        registry.GENERATION[0] += 1
