"""Another library's implementation of an op, for the bench: `peers.py` in the folder of an op lists them in `PEERS`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from tilewright.dispatch import Sample

Call = Callable[[], object]


@dataclass(frozen=True)
class LibraryPeer:
    """A library's call for a sample.

    module: the module that must be installed; None for torch itself.
    build: imports the library and returns its call on a sample, or None if the library has no such option.
    """

    name: str
    module: str | None
    build: Callable[[Sample], Call | None]

    def available(self) -> bool:
        """True if the library is installed."""
        return self.module is None or find_spec(self.module) is not None

    def make(self, sample: Sample) -> Call | None:
        """The library's call on the tensors of `sample`."""
        return self.build(sample)
