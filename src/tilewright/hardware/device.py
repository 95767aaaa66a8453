"""Name, architecture and size of a device, read once per device."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tilewright.hardware.known import GPUS, machine
from tilewright.settings import current

# The public functions in torch.cuda cost microseconds.  In a CPU build of torch these are None, and are not called.
_torch: Any = torch._C
_absent: Any = None
raw_stream: Callable[[int], int] = getattr(_torch, "_cuda_getCurrentRawStream", _absent)
raw_device: Callable[[], int] = getattr(_torch, "_cuda_getDevice", _absent)


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device.  arch: "sm_90", "gfx942" or "cpu"; sm_count: on a CPU, its cores."""

    name: str
    arch: str
    sm_count: int
    l2_bytes: int
    memory_bytes: int


def _as_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = torch.device(device)
    if result.type == "meta":  # a tensor without memory is planned for the GPU, present or not
        result = torch.device("cuda")
    if result.type == "cuda" and result.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return result


def device_info(device: torch.device | str | int | None = None) -> DeviceInfo:
    """Properties of `device`; None means the current GPU, or the CPU if there is none."""
    return _info(_as_device(device), current().arch)


def arch(device: torch.device | str | int | None = None) -> str:
    """Short architecture name of `device`: "sm_90", "gfx942", "cpu"."""
    return _info(_as_device(device), current().arch).arch


@cache
def _info(device: torch.device, planned: str | None) -> DeviceInfo:
    if device.type != "cuda":
        return _cpu()
    if not torch.cuda.is_available():
        return _planned(machine(planned or "sm_90"))
    p = torch.cuda.get_device_properties(device)
    name = p.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}"
    return DeviceInfo(p.name, name, p.multi_processor_count, p.L2_cache_size, p.total_memory)


def _planned(arch: str) -> DeviceInfo:
    """Properties of a typical GPU of `arch`, for which fake and meta tensors are planned on a machine without a GPU."""
    gpu = GPUS.get(arch)
    if gpu is None:
        return DeviceInfo("none", arch, 0, 0, 0)
    return DeviceInfo(gpu.name, arch, gpu.processors, gpu.l2_bytes, gpu.memory_bytes)


def _cpu() -> DeviceInfo:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceInfo(_cpu_name(), "cpu", cores, _last_level_cache(), pages)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _last_level_cache() -> int:
    """Bytes of the largest cache of core 0; 32 MiB if the kernel does not list it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] if text[-1].isalpha() else int(text))
    return max(sizes, default=32 << 20)
