"""`tilewright warmup`: compile everything that a suite or a model needs, ahead of time and without a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import Dtype, JsonOption, lengths, names
from tilewright.cli.output import check_writable, emit, say
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.warmup import Event, Outcome


def warm_up(
    suite: Annotated[
        str | None, typer.Option("--suite", metavar="NAME", help="Kernels for every workload of an op family, or all.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="CONFIG", help="Kernels for a model: folder, config.json, or e.g. tiny-llama."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="NAMES", help="Architectures: sm_90a,sm_100,cpu,...; default: this machine's."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="NAMES", help="Kernels of all these backends; default: those that dispatch chooses."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Element type; default: the suite's, or the model's own.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size of the model's calls.")] = 1,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="LENGTHS", help="Prompt lengths of the model's prefills.")
    ] = "1024,1000",
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Most tokens that the model decodes after a prefill.")
    ] = 128,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="The model's linear layers run in float8, as with patch(fp8=True).")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="BUNDLE", help="Write the kernels to this bundle as well.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Compilations at once; default: what memory and cores allow.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compile everything a suite or a model will need, into the kernel cache and, with --out, into a bundle.

    No GPU is needed. `tilewright cache import BUNDLE` brings the kernels to a machine that has no compiler.
    The exit code is 1 if something does not compile; then no bundle is written.
    """
    if (suite is None) == (model is None):
        raise UsageError("warmup needs one of --suite NAME (e.g. norm, or all) and --model CONFIG.")
    check_writable(out, json_file)
    from tilewright.jit import bundle
    from tilewright.warmup import Scope, warm

    scope = Scope(
        suite, model, tuple(names(backend) or ()), dtype and dtype.value, batch, lengths(tokens), new_tokens, fp8
    )
    began = time.monotonic()
    with _progress() as show:
        outcome = warm(scope, names(arch) or (), jobs=jobs, progress=show)
    for failure in outcome.failures:
        say(f"FAILED {failure.what} for {failure.arch}: {failure.reason}")
    written = None
    if out is not None and not outcome.failures and outcome.kernels:
        bundle.export(out, outcome.entries())
        written = str(out)
    result = _data(outcome, time.monotonic() - began, written)
    emit(result, _text(outcome, result), json_file)
    if outcome.failures:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a bar on stderr; yields the function that takes warm-up events."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilewright.warmup import Kernel, PlanSummary

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("planning", total=None)

        def show(event: "Event") -> None:
            if isinstance(event, PlanSummary):
                bar.update(task, description=event.arch, total=event.kernels, completed=0)
                return
            name = event.name if isinstance(event, Kernel) else event.what
            bar.update(task, description=f"{event.arch} {name.strip('_')}", advance=1)

        yield show


def _data(outcome: "Outcome", seconds: float, bundle: str | None) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 2),
        "bundle": bundle,
        "machines": [machine._asdict() for machine in outcome.machines],
        "kernels": [kernel._asdict() for kernel in outcome.kernels],
        "failed": [vars(failure) for failure in outcome.failures],
    }


def _text(outcome: "Outcome", data: dict[str, Any]) -> str:
    lines = []
    for machine in outcome.machines:
        built = [kernel for kernel in outcome.kernels if kernel.arch == machine.arch]
        spilling = sum(bool(kernel.info.get("spills")) for kernel in built)
        lines.append(
            f"{machine.arch}: {len(built)} kernels for {machine.calls} calls"
            + (f", of which torch computes {machine.by_torch}" if machine.by_torch else "")
            + (f"; {spilling} spill registers" if spilling else "")
        )
    lines.append(f"{data['seconds']:.1f} s" + (f"; wrote {data['bundle']}" if data["bundle"] else ""))
    return "\n".join(lines)
