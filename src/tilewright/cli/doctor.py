"""`tilewright doctor`: what this machine has, which backends can run, which settings are in force."""

import importlib.metadata
import platform
import shutil
from typing import Any

from tilewright import __version__
from tilewright.cli.options import JsonOption
from tilewright.cli.output import check_writable, emit

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


def show_machine(json_file: JsonOption = None) -> None:
    """Say what this machine has, which backends can run here, and which settings are in force."""
    check_writable(json_file)
    found = examine()
    emit(found, _text(found), json_file)


def examine() -> dict[str, Any]:
    """The report as plain data."""
    import torch

    from tilewright.dispatch import table
    from tilewright.dispatch.backends import BACKENDS, missing
    from tilewright.hardware import ceilings, device_info
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
        "g++": shutil.which("g++"),
        "devices": devices,
        "tables": [str(path) for folder in table.folders() for path in sorted(folder.glob("*.json"))],
        "settings": [{**row, "value": None if row["value"] is None else str(row["value"])} for row in describe()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(found: dict[str, Any]) -> str:
    lines = [f"tilewright {found['tilewright']}, python {found['python']}, CUDA of torch: {found['cuda'] or 'none'}"]
    lines += [f"  {name:18} {version or 'not installed'}" for name, version in found["packages"].items()]
    lines.append(f"  {'g++':18} {found['g++'] or 'not found: torch.compile on a CPU needs it'}")
    for name, d in found["devices"].items():
        units = f"{d['sm_count']} {'cores' if name == 'cpu' else 'SMs'}"
        lines.append(f"{name}: {d['name']} ({d['arch']}), {units}, {d['memory_bytes'] / 2**30:.0f} GiB")
        lines += [f"  {backend:18} {state}" for backend, state in d["backends"].items()]
        lines.append(f"  {'ceilings':18} {'measured' if d['calibrated'] else 'not measured: run tilewright calibrate'}")
    lines.append("tuning tables: " + (", ".join(found["tables"]) or "none"))
    lines += [f"  {row['names'][0]:28} {row['value'] or '-':24} {row['doc']}" for row in found["settings"]]
    return "\n".join(lines)
