"""Compile Triton kernels for GPUs this machine does not have, through their ordinary launch code.

    with target("gfx942") as compiled:
        wrapper(torch.empty(128, 4096, dtype=torch.bfloat16, device="meta"))
    assert resources(compiled[0]).spilled == 0

A stand-in driver reports the target's architecture and limits; Triton then specialises, compiles and "launches" as
usual (`@triton.autotune` included), but the binary loader and the launcher do nothing.  Triton's own limits act: too
much shared memory or too many threads raise `OutOfResources` as on the real GPU; an impossible grid raises ValueError.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel


class Limits(NamedTuple):
    """What one block may use and how many processors there are; from the vendors' architecture documents."""

    shared_bytes: int
    processors: int


TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
LIMITS: dict[str, Limits] = {
    "sm_80": Limits(163 << 10, 108),
    "sm_90": Limits(227 << 10, 132),
    "sm_100": Limits(227 << 10, 148),
    "gfx942": Limits(64 << 10, 304),
    "gfx950": Limits(160 << 10, 256),
}
MAX_THREADS = 1024  # per block, all five
MAX_GRID = (2**31 - 1, 65535, 65535)

# JITFunction keeps what it compiled per device number.  A number that was never used before makes every block compile
# anew (Triton's cache on disk still answers), so that each block sees all its kernels.
_device_numbers = itertools.count(1 << 16)


class _Utils:
    """Stands in for the driver's C extension."""

    def __init__(self, arch: str) -> None:
        self._limits = LIMITS[arch]
        self._warp_size = TARGETS[arch].warp_size

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._limits.shared_bytes,
            "multiprocessor_count": self._limits.processors,
            "warpSize": self._warp_size,
            "max_num_regs": 65536,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, blob: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, threads); nothing is loaded, see `resources` for the real numbers."""
        return 1, 1, 0, 0, MAX_THREADS


class _Launcher:
    """Accepts a launch that the GPU would accept and does nothing."""

    def __init__(self, src: object, metadata: object) -> None:
        self._src = src

    def __call__(self, x: int, y: int, z: int, *arguments: object) -> None:
        if not all(1 <= n <= limit for n, limit in zip((x, y, z), MAX_GRID, strict=True)):
            raise ValueError(f"grid {(x, y, z)} is outside 1..{MAX_GRID}")


class FakeDriver:
    """The part of Triton's driver interface that compiling and launching touch."""

    launcher_cls = _Launcher

    def __init__(self, arch: str) -> None:
        self.utils = _Utils(arch)
        self._target = TARGETS[arch]
        self._device = next(_device_numbers)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        """There is only this one."""

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Compiles every configuration an autotuner asks for; all cost the same, so the first wins."""

        def bench(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: object) -> list[float]:
            call()
            return [1.0] * len(quantiles or (0.5,))

        return bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Nothing was cached."""


@contextmanager
def target(arch: str) -> Iterator[list[CompiledKernel]]:
    """Compile for `arch` inside the block; yields the list that every kernel made there is appended to."""
    if arch not in TARGETS:
        raise ValueError(f"no target {arch!r}; there are {', '.join(TARGETS)}")
    compiled: list[CompiledKernel] = []
    init = CompiledKernel.__init__

    def recording_init(self: CompiledKernel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        compiled.append(self)

    driver = triton.runtime.driver
    active = driver._active  # reading `active` would look for a real GPU
    driver.set_active(FakeDriver(arch))
    CompiledKernel.__init__ = recording_init
    try:
        yield compiled
    finally:
        CompiledKernel.__init__ = init
        driver.set_active(active)
