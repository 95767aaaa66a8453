"""What a warm-up is asked for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.models.warmup.needed import RawCall


@dataclass(frozen=True)
class Wanted:
    """A suite or a model, and for what.

    suite     an op family or "all"
    model     a model folder, its config.json, or a built-in name (`needed.BUILT_IN`)
    backends  every one of these that can run; none: the one the dispatcher chooses
    dtype     "bf16", "fp16", "fp32"; None: what the suite declares, or the model's own
    batch     sequences of a model's prefill and decode step
    tokens    lengths of its prefills
    """

    suite: str | None = None
    model: str | None = None
    backends: tuple[str, ...] = ()
    dtype: str | None = None
    batch: int = 1
    tokens: tuple[int, ...] = (1024, 1000)

    def calls(self, device: str) -> "Iterable[RawCall]":
        """The raw calls, found anew.  device: "cpu" or "cuda", whose workloads a suite has."""
        from tilewright.models.warmup.needed import of_model, of_suite

        if self.model is not None:
            return of_model(self.model, self.dtype, self.batch, self.tokens)
        return of_suite(self.suite or "all", self.dtype, device)
