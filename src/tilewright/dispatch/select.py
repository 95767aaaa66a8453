"""Which implementation runs: a pure function of names, dtypes and buckets, usable at trace time as well as per call."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.dispatch import table
from tilewright.dispatch.backends import BACKENDS, importable, missing
from tilewright.dispatch.bucket import INVARIANT_ROWS
from tilewright.dispatch.registry import Implementation, implementations
from tilewright.errors import BackendError, TableError
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


def choose(raw: "RawOp", args: Sequence[Any], backend: str, numerics: str) -> Plan:
    """The plan for one call.  `backend` as in `dispatch.preference`.  Raises BackendError when a strict wish cannot be
    met.
    """
    bucket, dtype, device = raw.bucket_of(args, numerics), raw.dtype_of(args), raw.device_of(args)
    found = implementations(raw.op, raw.direction, raw.package, device.type)
    refused = {name: refusal(raw, found, name, args, numerics) for name in known(found)}
    text, dtype_name = raw.bucket_text(bucket), str(dtype).removeprefix("torch.")

    def plan(name: str, why: str, row: table.Row | None = None) -> Plan:
        made = _plan(raw, found.get(name), name, bucket, text, dtype, dtype_name, numerics, why, row)
        logger.debug("%s %s %s -> %s (%s)", raw.key, text, dtype_name, name, why)
        return made

    wanted = backend.rstrip("!")
    if wanted != "auto":
        reason = refused.get(wanted, missing(wanted, device.type) or "is not a registered backend of this op")
        if reason is None:
            return plan(wanted, "asked for in the call" if backend.endswith("!") else "preferred here")
        usable = [name for name, no in refused.items() if no is None]
        message = (
            f"{raw.key}[{wanted}] {reason} ({text}, {dtype_name}). Supported here: {', '.join(usable)}. "
            f'Try backend="{usable[0]}".'
        )
        if backend.endswith("!") or current().disable_fallback:
            raise BackendError(message)
        log_once(("fallback", raw.key, wanted, reason), f"falling back: {message}")

    row = table.lookup(raw.op, raw.direction, text, dtype_name, numerics, device_info(device))
    if row is not None:
        if refused.get(row.backend, "gone") is None:
            log_once(
                ("row", raw.key, text, dtype_name, numerics),
                f"{raw.key} {text} {dtype_name}: {row.backend} {row.config or ''} by {row.source} ({row.us} us)",
                logging.INFO,
            )
            return plan(row.backend, f"measured fastest: {row.us:g} us on {row.gpu}, {row.date} ({row.source})", row)
        why = refused.get(row.backend, "is not registered")
        log_once(
            ("row-refused", raw.key, text, dtype_name),
            f"{raw.key} {text}: table {row.source} wants {row.backend}, which {why}",
            logging.INFO,
        )
    first = next(name for name in known(found) if refused[name] is None)
    return plan(first, "unmeasured here; first of the static order that can run")


def known(found: dict[str, Implementation]) -> list[str]:
    """Backends of an op in static order: registered ones, those of other packages first, torch last."""
    return [name for name in (*(set(found) - set(BACKENDS)), *BACKENDS) if name in found or name == "torch"]


def refusal(
    raw: "RawOp", found: dict[str, Implementation], name: str, args: Sequence[Any], numerics: str
) -> str | None:
    """Why backend `name` cannot run this call, in words; None when it can."""
    if name == "torch":
        return None
    reason = missing(name, raw.device_of(args).type)
    if reason is None and name not in found:
        reason = "has no implementation of this op" if importable(name) else "is not installed"
    if reason is not None:
        return reason
    dtype = raw.dtype_of(args)
    if dtype not in raw.dtypes:
        allowed = ", ".join(str(d) for d in raw.dtypes)
        return f"takes {allowed}, got {dtype}"
    implementation = found[name]
    if numerics == "deterministic" and not implementation.deterministic:
        return "is not bitwise repeatable"
    if numerics == "batch_invariant" and not implementation.batch_invariant:
        return "is not batch invariant"
    return implementation.supports(*args) if implementation.supports else None


def _plan(
    raw: "RawOp",
    implementation: Implementation | None,
    name: str,
    bucket: tuple[int, ...],
    text: str,
    dtype: Any,
    dtype_name: str,
    numerics: str,
    why: str,
    row: table.Row | None,
) -> Plan:
    if implementation is None:
        return Plan(raw.op, raw.direction, name, text, dtype_name, numerics, None, None, why, row)
    config = implementation.configure(bucket, dtype) if implementation.configure else None
    if row is not None and row.config is not None and implementation.config_type is not None:
        try:
            config = implementation.config_type(**row.config)
        except TypeError as error:
            raise TableError(f"{row.source}: config {row.config} does not fit {raw.key}[{name}]: {error}.") from None
    return Plan(raw.op, raw.direction, name, text, dtype_name, numerics, config, implementation.launch, why, row)


def invariant(bucket: tuple[int, ...], batch_fields: Sequence[int]) -> tuple[int, ...]:
    """`bucket` with the batch dimension taken out of the decision."""
    return tuple(INVARIANT_ROWS if i in batch_fields else b for i, b in enumerate(bucket))
