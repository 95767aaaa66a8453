"""`tilewright doctor`: what this machine has, which backends can run, which settings are in force."""

import importlib.metadata
import platform
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tilewright import __version__
from tilewright.cli.options import JsonOption
from tilewright.cli.output import check_writable, emit
from tilewright.errors import UsageError

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "cuda-core",
    "cuda-tile",
    "nvidia-cuda-nvrtc",
    "jinja2",
    "matplotlib",
)


def show_machine(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Also compile and run proof kernels on every GPU; needs one.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Say what this machine has, which backends can run here, and which settings are in force.

    Where a compiler or driver library does not work, the output says what is wrong and what to install.
    The exit code is 1 if a proof kernel of --selftest fails.
    """
    check_writable(json_file)
    machine = examine()
    if selftest:
        machine["selftest"] = prove([name for name in machine["devices"] if name != "cpu"])
    emit(machine, _text(machine), json_file)
    if any(proof["error"] for proof in machine.get("selftest", [])):
        raise typer.Exit(1)


def prove(devices: list[str]) -> list[dict[str, Any]]:
    """Compile and run the proof kernels; one row for each device and kernel."""
    if not devices:
        raise UsageError("--selftest needs an NVIDIA GPU, and torch sees none here.")
    from tilewright.jit import selftest

    return [{"device": device, **proof._asdict()} for device in devices for proof in selftest.run(device)]


def examine() -> dict[str, Any]:
    """What `doctor` prints, as plain data."""
    import torch

    from tilewright.dispatch.backends import BACKENDS, missing
    from tilewright.dispatch.tables import table
    from tilewright.dispatch.tables.staleness import users_tables
    from tilewright.hardware import ceilings, device_info, toolchain
    from tilewright.settings import describe

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    devices = {}
    for name in (*gpus, "cpu"):
        info = device_info(name)
        devices[name] = {
            **vars(info),
            "backends": {b: missing(b, torch.device(name).type) or "available" for b in BACKENDS},
            "calibrated": ceilings.load(name) is not None,
        }
    return {
        "tilewright": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "toolchain": [asdict(finding) for finding in toolchain.examine()],
        "devices": devices,
        "tables": [str(path) for path in table.tables()],
        "users_tables": [{**asdict(state), "path": str(state.path)} for state in users_tables(devices)],
        "settings": [{**row, "value": None if row["value"] is None else str(row["value"])} for row in describe()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(machine: dict[str, Any]) -> str:
    from tilewright.dispatch.tables.staleness import in_words

    lines = [
        f"tilewright {machine['tilewright']}, python {machine['python']}, CUDA of torch: {machine['cuda'] or 'none'}"
    ]
    lines += [f"  {name:18} {version or 'not installed'}" for name, version in machine["packages"].items()]
    lines.append("compilers and driver:")
    for part in machine["toolchain"]:
        what = " ".join(filter(None, (part["version"], part["path"])))
        lines.append(f"  {part['name']:28} {what or 'not found'}")
        lines += [f"    {sign} {part[key]}" for key, sign in (("problem", "!"), ("advice", "->")) if part[key]]
    for name, d in machine["devices"].items():
        units = f"{d['sm_count']} {'cores' if name == 'cpu' else 'SMs'}"
        lines.append(f"{name}: {d['name']} ({d['arch']}), {units}, {d['memory_bytes'] / 2**30:.0f} GiB")
        lines += [f"  {backend:18} {state}" for backend, state in d["backends"].items()]
        lines.append(f"  {'ceilings':18} {'measured' if d['calibrated'] else 'not measured: run tilewright calibrate'}")
    lines.append("tuning tables: " + (", ".join(machine["tables"]) or "none"))
    for state in machine["users_tables"]:
        if state["stale"]:
            lines.append(f"  ! {state['stale']} of {state['rows']} rows of {state['path']} are stale, measured with")
            lines.append(f"    {in_words(state['changes'])}")
            lines.append("    -> run tilewright tune with your model, or with the op, to measure them again")
    lines += [f"  {row['names'][0]:28} {row['value'] or '-':24} {row['doc']}" for row in machine["settings"]]
    for proof in machine.get("selftest", []):
        lines.append(f"{proof['device']} {proof['name']}: {proof['error'] or 'exact'} ({proof['seconds']:.2f} s)")
    return "\n".join(lines)
