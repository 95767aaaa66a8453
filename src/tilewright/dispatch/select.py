"""Which implementation runs: a pure function of names, dtypes and buckets, usable at trace time as well as per call."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.dispatch.backends import missing
from tilewright.dispatch.bucket import INVARIANT_ROWS
from tilewright.dispatch.options import Option, lacks_default, options
from tilewright.dispatch.registry import implementations
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.configs import from_row
from tilewright.errors import KernelMissingError, RefusedError, TableError
from tilewright.hardware import device_info
from tilewright.log import log_once, logger
from tilewright.settings import current

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp


@dataclass(frozen=True)
class Plan:
    """A decision, ready to launch.  `launch` is None for the torch reference.  `why` says how it came about, in
    words.
    """

    op: str
    direction: str
    backend: str
    bucket: str
    dtype: str
    numerics: str
    config: Any
    launch: Callable[..., None] | None
    why: str
    row: table.Row | None
    requested: str  # the `backend` that was asked for
    kernel: str = ""  # which of the backend's kernels; "" for torch, and for what `register_impl` registered
    provisional: bool = field(default=False, compare=False)  # a later call is to be measured: no call is replayed by it


def choose(
    raw: "RawOp", args: Sequence[Any], backend: str, numerics: str, without: Mapping[str, str] | None = None
) -> Plan:
    """The plan for one call.  `backend` as in `dispatch.preference`.  without: backends that cannot run it, and why.

    Raises RefusedError where `backend=` in the call cannot run.
    """
    bucket, dtype, device = raw.bucket_of(args, numerics), raw.dtype_of(args), raw.device_of(args)
    if raw.compose is not None:
        return _composed(raw, bucket, dtype, backend, numerics)
    without = without or {}
    per_backend = options(raw, implementations(raw.op, raw.direction, device.type), args, numerics)
    per_backend |= {name: Option(None, reason) for name, reason in without.items()}
    why_not = {name: option.why_not for name, option in per_backend.items()}
    usable = [name for name, reason in why_not.items() if reason is None]
    text, dtype_name = raw.bucket_text(bucket), str(dtype).removeprefix("torch.")

    row = table.lookup(raw.op, raw.direction, text, dtype_name, numerics, device_info(device))
    tuned, misfits = _tuned(row, per_backend, bucket, dtype) if row is not None else ({}, {})

    def plan(name: str, why: str, row: table.Row | None = None) -> Plan:
        implementation = per_backend[name].implementation
        config = tuned.get(name)
        if config is None and implementation is not None and implementation.configure is not None:
            config = implementation.configure(bucket, dtype)
            if config is None:  # asked for by name where `auto` would go on
                config = implementation.space(bucket, dtype)[0]
        logger.debug("%s %s %s -> %s (%s)", raw.key, text, dtype_name, name, why)
        launch = None if implementation is None else implementation.launch
        if launch is not None and raw.direct is not None:
            launch = partial(_write, raw, launch)
        kernel = "" if implementation is None else implementation.kernel_of(config).kernel
        return Plan(raw.op, raw.direction, name, text, dtype_name, numerics, config, launch, why, row, backend, kernel)

    requested = backend.rstrip("!")
    if raw.direction == "bwd" and requested not in per_backend:
        requested = "auto"  # a backend without a backward kernel was requested for its forward
    if requested != "auto":
        reason = why_not.get(requested, missing(requested, device.type) or "is not a registered backend of this op")
        if reason is None:
            return plan(requested, "asked for in the call" if backend.endswith("!") else "preferred here")
        message = (
            f"{raw.key}[{requested}] {reason} ({text}, {dtype_name}). Supported here: {', '.join(usable)}. "
            f'Try backend="{usable[0]}".'
        )
        if backend.endswith("!") or current().disable_fallback:
            raise (KernelMissingError if requested in without else RefusedError)(message)
        log_once(("fallback", raw.key, requested, reason), f"falling back: {message}")

    why = "unmeasured here"
    if row is not None:
        problem = f"{raw.key} {text} {dtype_name}"
        for choice in row.choices:
            reason = why_not.get(choice.backend, "is not registered")
            if reason is None and choice.backend not in misfits:
                source = f"{choice.backend} {choice.config or ''} by {row.source} ({choice.us} us)"
                log_once(("row", problem, numerics), f"{problem}: {source}", logging.INFO)
                return plan(choice.backend, _cited(row, choice), row)
            why = f"the measured choice is refused: {misfits.get(choice.backend) or f'{choice.backend} {reason}'}"
            level = logging.WARNING if reason is None else logging.INFO
            log_once(("row-refused", problem, choice.backend), f"{problem}: {why}", level)
    first = next(
        (name for name in usable if not lacks_default(per_backend[name].implementation, bucket, dtype)), usable[0]
    )
    if numerics == "default" and raw.torch_first is not None and raw.torch_first(bucket, dtype, first):
        return plan("torch", f"{why}; torch's kernel is the better guess for these sizes")
    return plan(first, f"{why}; first of the static order that can run")


def _write(raw: "RawOp", launch: Callable[..., None], outs: tuple[Any, ...], *args: Any, config: Any) -> None:
    """Launch into `outs`, or where an implementation cannot write there, into memory of its own that is then copied."""
    assert raw.direct is not None
    if all(raw.direct(out, *args) for out in outs):
        launch(outs, *args, config=config)
        return
    results = raw.allocate(args, outs[0].device)
    launch(results, *args, config=config)
    for out, value in zip(outs, results, strict=True):
        out.copy_(value)


def _composed(raw: "RawOp", bucket: tuple[int, ...], dtype: Any, backend: str, numerics: str) -> Plan:
    """The plan of an op composed of others.  `backend=` in a call is only a preference for its parts: it was requested
    for a forward, and a product of its gradient may have sizes or strides that this backend does not take.
    """
    preferred = backend.rstrip("!")

    def launch(outs: tuple[Any, ...], *args: Any, config: Any) -> None:
        assert raw.compose is not None
        raw.compose(run, outs, *args)

    def run(op: "RawOp", out: Any, *args: Any) -> None:
        op.write(out, args, preferred, numerics)

    text, name = raw.bucket_text(bucket), str(dtype).removeprefix("torch.")
    why = "made of other ops, each of which chooses for itself"
    chosen = None if preferred == "torch" else launch
    return Plan(raw.op, raw.direction, preferred, text, name, numerics, None, chosen, why, None, backend)


def _tuned(
    row: table.Row, per_backend: Mapping[str, Option], bucket: tuple[int, ...], dtype: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """What a row says of backends that can run: (measured configs, reasons why one does not fit)."""
    configs: dict[str, Any] = {}
    misfits: dict[str, str] = {}
    for choice in row.choices:
        implementation = per_backend[choice.backend].implementation if choice.backend in per_backend else None
        if choice.config is not None and implementation is not None:
            try:
                configs[choice.backend] = from_row(implementation, choice.config, bucket, dtype)
            except TableError as error:
                misfits[choice.backend] = f"{row.source}: {error}"
    return configs, misfits


def _cited(row: table.Row, choice: table.Row | table.Other) -> str:
    """Where a choice comes from, and what it was measured against."""
    runner_up = f", {row.runner_up.backend} {row.runner_up.us:g} us" if row.runner_up else ""
    where = f"on {row.gpu}, {row.date} ({row.source})"
    if choice is row:
        return f"measured fastest: {row.us:g} us {where}{runner_up}"
    return f"measured next to {row.backend}, which cannot run here: {choice.us:g} us {where}"


def invariant(bucket: tuple[int, ...], batch_fields: Sequence[int]) -> tuple[int, ...]:
    """`bucket` with the batch dimension taken out of the decision."""
    values = [INVARIANT_ROWS if i in batch_fields else b for i, b in enumerate(bucket)]
    return bucket._make(values) if hasattr(bucket, "_make") else tuple(values)
