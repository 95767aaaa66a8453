"""The machine block of every result: device, versions, clocks, ceilings."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from tilewright.hardware import device_info
from tilewright.hardware.ceilings import driver_version
from tilewright.version import __version__

_QUERY = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run.   clocks: readings before and after.   ceilings: those of the same run."""

    device: str
    arch: str
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    tilewright: str
    python: str
    os: str
    cpu: str
    cpu_cores: int
    torch_threads: int
    date: str
    clocks: dict[str, dict[str, float] | None]
    ceilings: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the machine block of result files."""
        return asdict(self)


def describe(
    device: torch.device | str,
    *,
    before: dict[str, float] | None = None,
    after: dict[str, float] | None = None,
    ceilings: dict[str, float] | None = None,
) -> Machine:
    """Read everything but clocks and ceilings, which the caller measured before and after the run."""
    info, cpu = device_info(device), device_info("cpu")
    return Machine(
        device=info.name,
        arch=info.arch,
        sm_count=info.sm_count,
        l2_bytes=info.l2_bytes,
        memory_bytes=info.memory_bytes,
        driver=driver_version(device),
        cuda=torch.version.hip or torch.version.cuda,
        torch=torch.__version__,
        triton=_version("triton"),
        tilewright=__version__,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu.name,
        cpu_cores=cpu.sm_count,
        torch_threads=torch.get_num_threads(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        clocks={"before": before, "after": after},
        ceilings=ceilings or {},
    )


def clocks(device: torch.device | str) -> dict[str, float] | None:
    """Clocks, power and temperature, read by nvidia-smi now.

    None on a CPU, or where nvidia-smi is missing or fails.
    """
    target = torch.device(device)
    tool = shutil.which("nvidia-smi")
    if target.type != "cuda" or tool is None:
        return None
    uuid = torch.cuda.get_device_properties(target).uuid
    command = [tool, f"--id=GPU-{uuid}", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader,nounits"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if process.returncode != 0:
        return None
    readings = {}
    for name, text in zip(_QUERY, process.stdout.strip().split(","), strict=False):
        try:
            readings[name] = float(text)
        except ValueError:  # "[N/A]": this board does not report it
            continue
    return readings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
