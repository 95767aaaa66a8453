"""Say which implementation a call would take, and why each other one would not, without running it."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import catalogue
from tilewright.dispatch.contract import contract
from tilewright.dispatch.recording import record
from tilewright.dispatch.registry import implementations
from tilewright.dispatch.select import known, refusal


@dataclass(frozen=True)
class Verdict:
    """One implementation of one raw op: `refused` says why it cannot run; None when it could."""

    backend: str
    chosen: bool
    refused: str | None


@dataclass(frozen=True)
class Explanation:
    """What would happen in one call.  `str()` is for people, `to_dict()` for programs.

    stale: how the versions have changed since the row behind the choice was measured; "" where they have not.
    """

    op: str
    direction: str
    bucket: str
    dtype: str
    device: str
    numerics: str
    backend: str
    why: str
    config: str
    verdicts: tuple[Verdict, ...]
    kernel: str = ""
    stale: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op} ({self.direction})  {self.bucket} {self.dtype} on {self.device}, numerics {self.numerics}"]
        chosen = f"{self.backend} ({self.kernel})" if self.kernel else self.backend
        lines.append(f"  -> {chosen}: {self.why}" + (f", {self.config}" if self.config != "None" else ""))
        if self.stale:
            lines.append(f"     the row is stale, measured with {self.stale}: `tilewright tune` measures it again")
        for v in self.verdicts:
            if not v.chosen:
                lines.append(f"     {v.backend}: " + (v.refused or "could run"))
        return "\n".join(lines)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Every implementation of `op` for this call, chosen or refused, in words.  Tensors may be real or fake.

    It is the call as it would be made here: where a tensor requires a gradient and autograd is on, one with a gradient.
    Raises what the call itself would raise for bad input, and BackendError for a strict backend that cannot run.
    """
    from tilewright.dispatch.tables.staleness import changes, in_words  # it reads versions of compilers

    catalogue.load(op)
    function = contract(op).function
    values = (*args, *kwargs.values())
    mode = next((a.fake_mode for a in values if hasattr(a, "fake_mode")), None) or FakeTensorMode()
    fake = [mode.from_tensor(a) if type(a) in (torch.Tensor, torch.nn.Parameter) else a for a in values]
    with mode, record() as recording:
        function(*fake[: len(args)], **dict(zip(kwargs, fake[len(args) :], strict=True)))
    raw, raw_args, _, numerics = recording.calls[0]
    plan = recording.plans[0]
    backends = implementations(raw.op, raw.direction, raw.package)
    verdicts = tuple(
        Verdict(name, name == plan.backend, refusal(raw, backends, name, raw_args, numerics))
        for name in known(backends)
    )
    device = raw_args[0].device
    stale = "" if plan.row is None else in_words(changes(plan.row, device.type))
    return Explanation(
        op, raw.direction, plan.bucket, plan.dtype, str(device), numerics, plan.backend, plan.why,
        str(plan.config), verdicts, plan.kernel, stale,
    )  # fmt: skip
