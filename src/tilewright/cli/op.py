"""`tilewright ops | explain | check`: what exists, what would run, and whether it is right."""

from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.output import JsonOption, emit, parse_case, parse_dtype
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.dispatch import RawOp

OpArgument = Annotated[str, typer.Argument(metavar="OP", help="An op's name; see `tilewright ops`.")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="bf16, fp16 or fp32.")]
CaseOption = Annotated[
    str | None, typer.Option("--case", help="Sizes as the op's workloads name them, e.g. M=8,N=4096.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Exactly this backend: cuda, cutile, triton, cpu, torch.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:1, cpu; default: the GPU if there is one.")
]


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("ops")(list_ops)
    app.command("explain")(explain_op)
    app.command("check")(check_op)


def list_ops(json_file: JsonOption = None) -> None:
    """List every op with its backends."""
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.dispatch import contracts

    found = [
        {
            "op": c.name,
            "family": c.family,
            "summary": c.summary,
            "backends": {raw.direction: _backends(raw) for raw in c.raw_ops},
        }
        for c in contracts().values()
    ]
    lines = [f"{'op':16}{'family':12}{'forward':18}{'backward':18}summary"]
    for c in contracts().values():
        by = dict.fromkeys(("fwd", "bwd"), "-") | {raw.direction: ", ".join(_backends(raw)) for raw in c.raw_ops}
        lines.append(f"{c.name:16}{c.family:12}{by['fwd']:18}{by['bwd']:18}{c.summary}")
    emit(found, "\n".join(lines), json_file)


def _backends(raw: "RawOp") -> list[str]:
    from tilewright.dispatch import implementations

    return sorted({*implementations(raw.op, raw.direction, raw.package), "torch"})


def explain_op(
    op: OpArgument,
    case: CaseOption = None,
    dtype: DtypeOption = "bf16",
    device: DeviceOption = None,
    backend: BackendOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say which implementation a call would take, why, and why each other one would not."""
    import torch

    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.dispatch import contract, explain

    found = contract(op)
    place = _device(device)
    params = parse_case(case) or dict(found.workloads[0].params)
    try:
        sample = found.inputs(params, parse_dtype(dtype), torch.device("cpu"), 0)
    except KeyError as missing:
        raise UsageError(
            f"--case {case}: {op} also needs {missing}, as in {dict(found.workloads[0].params)}."
        ) from None
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=place) if isinstance(a, torch.Tensor) else a
            for a in sample.args
        ]
    result = explain(op, *args, **sample.kwargs, **({"backend": backend} if backend else {}))
    emit(result.to_dict(), str(result), json_file)


def check_op(
    op: OpArgument,
    case: Annotated[
        str | None, typer.Option("--case", help="One edge case or workload by name; default: every edge case.")
    ] = None,
    modes: Annotated[str, typer.Option("--modes", help="all, quick, or names separated by commas.")] = "all",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    backend: BackendOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the random inputs; default: fresh.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Check an op against its float64 oracle in every execution mode; exit code 1 if anything fails."""
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.validate import check

    wanted = modes if modes in ("all", "quick") else modes.split(",")
    report = check(op, case, modes=wanted, backend=backend, dtype=parse_dtype(dtype), device=_device(device), seed=seed)
    emit(report.to_dict(), str(report), json_file)
    if not report.passed:
        raise typer.Exit(1)


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: not a device. Examples: cuda, cuda:1, cpu.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch sees no GPU here. Use cpu.")
    return name
