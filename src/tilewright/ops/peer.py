"""Another library's implementation of an op, as `peers.py` beside an op lists it in `PEERS` for the bench."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from tilewright.dispatch import Sample

Call = Callable[[], object]


@dataclass(frozen=True)
class LibraryPeer:
    """`build` turns a sample into the library's call, or None where it has no such option; it imports the library.

    module: what must be importable; None for torch itself.
    """

    name: str
    module: str | None
    build: Callable[[Sample], Call | None]

    def available(self) -> bool:
        """Is the library installed?"""
        return self.module is None or find_spec(self.module) is not None

    def make(self, sample: Sample) -> Call | None:
        """The call, on the sample's own tensors."""
        return self.build(sample)
