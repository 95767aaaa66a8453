"""The backends that a call may choose from: which can run it, with which kernels, and why the others cannot."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.dispatch.backends import BACKENDS, missing
from tilewright.dispatch.registry import Implementation, joint_reason

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp


class Option(NamedTuple):
    """One backend in one call.

    implementation  what runs the call, without the kernels that cannot; None for torch's reference, and where none can
    why_not         the reason that nothing of this backend can run it, in words; None where something can
    """

    implementation: Implementation | None
    why_not: str | None = None


def options(
    raw: "RawOp", backends: Mapping[str, Implementation], args: Sequence[Any], numerics: str
) -> dict[str, Option]:
    """Every one of `backends`, and torch, in static order: those of other packages first, torch last."""
    names = [name for name in backends if name not in BACKENDS]
    names += [name for name in BACKENDS if name in backends or name == "torch"]
    return {
        name: Option(backends.get(name)) if name == "torch" else _option(raw, backends[name], args, numerics)
        for name in names
    }


def runnable(
    raw: "RawOp", backends: Mapping[str, Implementation], args: Sequence[Any], numerics: str
) -> dict[str, Implementation | None]:
    """Those of `options` that can run the call, in the same order, with what runs it; None for torch's reference."""
    items = options(raw, backends, args, numerics).items()
    return {name: option.implementation for name, option in items if option.why_not is None}


def _option(raw: "RawOp", implementation: Implementation, args: Sequence[Any], numerics: str) -> Option:
    dtype, reason = raw.dtype_of(args), missing(implementation.backend, raw.device_of(args).type)
    if reason is None and dtype not in raw.dtypes:
        reason = f"takes {', '.join(map(str, raw.dtypes))}, got {dtype}"
    if reason is not None:
        return Option(None, reason)
    kernels = implementation.kernels or (implementation,)
    reasons = [_why_not(kernel, args, numerics) for kernel in kernels]
    able = [kernel for kernel, reason in zip(kernels, reasons, strict=True) if reason is None]
    if not able:
        return Option(None, joint_reason(kernels, reasons))
    chosen = implementation.only(able)
    bucket = raw.bucket_of(args, numerics)
    # Candidates take time to find, and are looked for only where there is no default
    if lacks_default(chosen, bucket, dtype) and chosen.space(bucket, dtype) == (None,):
        return Option(None, "has no configuration for these sizes")
    return Option(chosen)


def lacks_default(implementation: Implementation | None, bucket: tuple[int, ...], dtype: Any) -> bool:
    """Does a backend leave these sizes to the next, though a table's row may name one of its candidates?"""
    configure = None if implementation is None else implementation.configure
    return configure is not None and configure(bucket, dtype) is None


def _why_not(kernel: Implementation, args: Sequence[Any], numerics: str) -> str | None:
    if numerics == "deterministic" and not kernel.deterministic:
        return "is not bitwise repeatable"
    if numerics == "batch_invariant" and not kernel.batch_invariant:
        return "is not batch invariant"
    return kernel.supports(*args) if kernel.supports else None
