"""Say which implementation a call would take, and why each other one would not, without running it."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tilewright import catalogue
from tilewright.dispatch.contract import contract
from tilewright.dispatch.options import options
from tilewright.dispatch.recording import record
from tilewright.dispatch.registry import implementations


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
    """Every implementation of `op` for this call, chosen or refused, in words.  Tensors may be real or fake, also
    those inside lists and tuples.

    It is the call as it would be made here: where a tensor requires a gradient and autograd is on, one with a gradient.
    Raises what the call itself would raise for bad input, and BackendError for a strict backend that cannot run.
    """
    from tilewright.dispatch.tables.staleness import changes, in_words  # it reads versions of compilers

    catalogue.load(op)
    function = contract(op).function
    fake_args, fake_kwargs, mode = _fake(args, kwargs)
    with mode, record() as recording:
        function(*fake_args, **fake_kwargs)
    raw, raw_args, _, numerics = recording.calls[0]
    plan = recording.plans[0]
    backends = implementations(raw.op, raw.direction)
    verdicts = tuple(
        Verdict(name, name == plan.backend, option.why_not)
        for name, option in options(raw, backends, raw_args, numerics).items()
    )
    device = raw.device_of(raw_args)
    stale = "" if plan.row is None else in_words(changes(plan.row, device.type))
    return Explanation(
        op, raw.direction, plan.bucket, plan.dtype, str(device), numerics, plan.backend, plan.why,
        str(plan.config), verdicts, plan.kernel, stale,
    )  # fmt: skip


def _fake(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], FakeTensorMode]:
    """The arguments with fake tensors in place of real ones, and their mode: that of a fake one among them, or new."""
    modes = (leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "fake_mode"))
    mode = next(modes, None) or FakeTensorMode()

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if type(leaf) in (torch.Tensor, torch.nn.Parameter) else leaf

    return *tree_map(fake, (args, kwargs)), mode
