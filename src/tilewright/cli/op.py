"""`tilewright ops | explain | check`: what exists, what would run, and whether it is right."""

from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    OpArgument,
    device,
    names,
    torch_dtype,
)
from tilewright.cli.output import aligned, check_writable, emit
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.dispatch import RawOp

CaseOption = Annotated[
    str | None,
    typer.Option("--case", metavar="NAME|SIZES", help="A workload or edge case by name, or sizes: M=8,N=4096."),
]


def list_ops(json_file: JsonOption = None) -> None:
    """List every op with its backends."""
    check_writable(json_file)
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.dispatch import contracts

    listed = [
        {
            "op": c.name,
            "family": c.family,
            "summary": c.summary,
            "backends": {raw.direction: _backends(raw) for raw in dict.fromkeys((c.forward, *c.raw_ops))},
        }
        for c in contracts().values()
    ]
    rows = [("op", "family", "forward", "backward", "summary")]
    for c in contracts().values():
        backends = {raw.direction: ", ".join(_backends(raw)) for raw in dict.fromkeys((c.forward, *c.raw_ops))}
        rows.append((c.name, c.family, backends["fwd"], backends.get("bwd", "-"), c.summary))
    emit(listed, "\n".join(aligned(rows)), json_file)


def _backends(raw: "RawOp") -> list[str]:
    from tilewright.dispatch import implementations

    return sorted({*implementations(raw.op, raw.direction), "torch"})


def explain_op(
    op: OpArgument,
    case: CaseOption = None,
    dtype: DtypeOption = None,
    device_name: DeviceOption = None,
    backend: BackendOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say which implementation a call would take, why, and why each other one would not.

    Nothing is run, so `--device cuda` works without a GPU: it plans for TILEWRIGHT_ARCH (default sm_90).
    """
    check_writable(json_file)
    place = device(device_name, planned=True)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.cli.case import shapes, workload
    from tilewright.dispatch import contract, explain

    op_contract = contract(op)
    sample = shapes(op_contract, workload(op_contract, case) if case else op_contract.workloads[0], torch_dtype(dtype))
    with FakeTensorMode():
        args = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=place) if isinstance(a, torch.Tensor) else a
            for a in sample.args
        ]
    result = explain(op, *args, **sample.kwargs, backend=backend)
    emit(result.to_dict(), str(result), json_file)


def check_op(
    op: OpArgument,
    case: CaseOption = None,
    modes: Annotated[
        str, typer.Option("--modes", metavar="NAMES", help="all, quick, or names separated by commas.")
    ] = "all",
    dtype: DtypeOption = None,
    device_name: DeviceOption = None,
    backend: BackendOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the random inputs; default: a fresh one.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Check an op against its float64 oracle in every execution mode; by default on every edge case.

    The exit code is 1 if anything fails, or if nothing could run.
    """
    check_writable(json_file)
    place = device(device_name)
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.cli.case import workload
    from tilewright.dispatch import contract
    from tilewright.dispatch.backends import check_name, missing
    from tilewright.validate import check

    if backend is not None:
        check_name(backend)

    op_contract = contract(op)
    if backend is not None and (reason := missing(backend, place.partition(":")[0])):
        raise UsageError(f"check {op}: backend {backend!r} {reason}.")
    report = check(
        op_contract,
        workload(op_contract, case) if case else None,
        modes=modes if modes in ("all", "quick") else names(modes) or (),
        backend=backend,
        dtype=torch_dtype(dtype),
        device=place,
        seed=seed,
    )
    emit(report.to_dict(), str(report), json_file)
    if not report.passed:
        raise typer.Exit(1)
