"""A registry of one's own: what a test registers under a real backend's name must not replace the real one for good."""

from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.dispatch import registry


@contextmanager
def own_registry() -> Iterator[None]:
    """Registrations inside the block end with it; those from before are there again."""
    before = {key: dict(found) for key, found in registry._implementations.items()}
    try:
        yield
    finally:
        # Modules that the block imported (`triton.py` of some op) registered themselves, and will not do so again
        for key, found in registry._implementations.items():
            for name, implementation in found.items():
                if implementation.launch.__module__.endswith(f".{name}"):
                    before.setdefault(key, {}).setdefault(name, implementation)
        registry._implementations.clear()
        registry._implementations.update(before)
        registry.GENERATION[0] += 1
