"""What a warm-up prepares."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.jit.collect import Job
    from tilewright.warmup.calls import RawCall


@dataclass(frozen=True)
class Scope:
    """A suite or a model, and the backends, dtype and sizes to prepare.

    suite     an op family or "all"
    model     a model folder, its config.json, or a built-in name (`needed.BUILT_IN`)
    backends  every one of these that can run; none: the one the dispatcher chooses
    dtype     "bf16", "fp16", "fp32"; None: what the suite declares, or the model's own
    batch     sequences of a model's prefill and decode step
    tokens    lengths of its prefills
    new_tokens  tokens that its static cache holds in addition
    fp8       linear layers in float8, as `patch(fp8=True)`
    """

    suite: str | None = None
    model: str | None = None
    backends: tuple[str, ...] = ()
    dtype: str | None = None
    batch: int = 1
    tokens: tuple[int, ...] = (1024, 1000)
    new_tokens: int = 128
    fp8: bool = False

    def needs(self, arch: str) -> "tuple[Iterable[RawCall], list[Job]]":
        """Trace the raw calls, and the kernels that belong to no op, of a machine `arch`."""
        from tilewright.warmup.needed import trace_model, trace_suite

        if self.model is None:
            return trace_suite(self.suite or "all", self.dtype, "cpu" if arch == "cpu" else "cuda"), []
        return trace_model(
            self.model, self.dtype, self.batch, self.tokens, arch=arch, new_tokens=self.new_tokens, fp8=self.fp8
        )
