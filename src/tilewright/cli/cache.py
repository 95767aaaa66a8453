"""`tilewright cache list | info | clear | export | import`: the kernels compiled so far, and bundles of them."""

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import JsonOption
from tilewright.cli.output import check_writable, emit
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.jit.cache import Entry

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_KINDS = ("cuda", "cutile", "triton", "host")

KindOption = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help=f"Only kernels in this language: {', '.join(_KINDS)}.")
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="NAME,...", help="Only kernels for these architectures, e.g. sm_90a.")
]
AgeOption = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Only kernels not used for this long: 45m, 12h, 30d.")
]
BundleArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A bundle: one zip file.")]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def start(context: typer.Context) -> None:
    """Manage compiled kernels: list, info, clear, export, import."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _command(name: str, example: str) -> Any:
    return app.command(name, epilog=f"Example: tilewright cache {name} {example}")


@_command("list", "--kind cuda --json -")
def list_entries(kind: KindOption = None, arch: ArchOption = None, json_file: JsonOption = None) -> None:
    """List the compiled kernels on disk."""
    check_writable(json_file)
    entries = _chosen(kind, arch)
    now = time.time()
    rows: list[tuple[str, ...]] = [("kernel", "kind", "arch", "compiler", "KiB", "unused")]
    rows += [(e.name, e.kind, e.arch, e.compiler, f"{e.size / 1024:.0f}", _age(now - e.used)) for e in entries]
    emit([{**asdict(e), "folder": str(e.folder)} for e in entries], _table(rows), json_file)


@_command("info", "--json -")
def show_info(json_file: JsonOption = None) -> None:
    """Say where the cache is, how full it is, and what is in it."""
    check_writable(json_file)
    from tilewright.jit import cache

    info = cache.info()
    kinds = {kind: {"entries": count, "bytes": size} for kind, (count, size) in sorted(info.kinds.items())}
    data = {
        "folder": str(info.folder),
        "writable": info.writable,
        "entries": info.entries,
        "bytes": info.bytes,
        "limit_bytes": info.limit_bytes,
        "kinds": kinds,
    }
    lines = [
        f"{info.folder}" + ("" if info.writable else " (not writable: compiled kernels stay in memory)"),
        f"{_entries(info.entries)}, {_mib(info.bytes)} of at most {_mib(info.limit_bytes)}",
    ]
    lines += [f"  {kind:8} {_entries(totals['entries'])}, {_mib(totals['bytes'])}" for kind, totals in kinds.items()]
    emit(data, "\n".join(lines), json_file)


@_command("clear", "--older-than 30d")
def clear(kind: KindOption = None, older_than: AgeOption = None, json_file: JsonOption = None) -> None:
    """Remove compiled kernels.  Those that another process is compiling now stay."""
    check_writable(json_file)
    kind, age = _known(kind), _seconds(older_than)
    from tilewright.jit import cache

    removed = cache.clear(kind, age)
    emit({"removed": removed}, f"{_entries(removed)} removed from {cache.store().root}", json_file)


@_command("export", "kernels.zip --arch sm_90a")
def export_bundle(
    file: BundleArgument, kind: KindOption = None, arch: ArchOption = None, json_file: JsonOption = None
) -> None:
    """Write compiled kernels to a bundle, for a machine that has no compiler."""
    check_writable(json_file, file)
    from tilewright.jit import bundle, cache

    chosen = _chosen(kind, arch)
    if not chosen:
        root = cache.store().root
        raise UsageError(f"nothing to export: {root} has no such entry. `tilewright cache list` shows all.")
    count = bundle.export(file, chosen)
    size = file.stat().st_size
    emit({"file": str(file), "entries": count, "bytes": size}, f"{file}: {_entries(count)}, {_mib(size)}", json_file)


@_command("import", "kernels.zip")
def import_bundle(file: BundleArgument, json_file: JsonOption = None) -> None:
    """Copy the kernels of a bundle into the cache.  They are machine code: import only what you trust."""
    check_writable(json_file)
    from tilewright.jit import bundle, cache

    count = bundle.load(file)
    root = cache.store().root
    emit({"entries": count, "folder": str(root)}, f"{_entries(count)} of {file} in {root}", json_file)


def _chosen(kind: str | None, arch: str | None) -> "list[Entry]":
    kind = _known(kind)
    from tilewright.jit import cache

    archs = None if arch is None else {name.strip() for name in arch.split(",")}
    return [e for e in cache.entries() if kind in (None, e.kind) and (archs is None or e.arch in archs)]


def _known(kind: str | None) -> str | None:
    if kind is not None and kind not in _KINDS:
        raise UsageError(f"--kind {kind}: allowed are {', '.join(_KINDS)}.")
    return kind


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", age)
    if match is None:
        raise UsageError(f"--older-than {age}: give minutes, hours or days: 45m, 12h, 30d.")
    return float(match[1]) * _SECONDS[match[2]]


def _age(seconds: float) -> str:
    for unit in ("d", "h"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0) / 60:.0f}m"


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
