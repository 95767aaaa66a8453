"""Launch Triton kernels with a host path of a few microseconds.

`kernel[grid](...)` binds the signature, specialises every argument and hashes the options in each call.
`TritonKernel` does that once per specialisation, and then passes the arguments directly to a C launcher.

The key repeats what Triton 3.6 specialises on for NVIDIA: a pointer's dtype and 16-byte alignment; an integer being 1,
a multiple of 16, or wider than 32 bits.  Everything else (other versions of Triton, whose specialisation and launcher
are theirs, the interpreter, AMD with its pointer ranges, profiler launch hooks) takes Triton's own path.

A specialisation in the kernel cache, from `tilewright warmup` or an imported bundle, is launched through cuda-core:
then neither Triton's compiler nor the C compiler for its launcher is called.  Triton compiles all others.
"""

import functools
import logging
import threading
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from tilewright.hardware import arch
from tilewright.hardware.device import raw_stream as _current_stream
from tilewright.jit import cache, driver, triton_compile
from tilewright.jit.artifact import Artifact
from tilewright.jit.collect import Collector, collecting
from tilewright.jit.tape import Step, scratch, taping
from tilewright.log import log_once
from tilewright.settings import current

OWN_LAUNCHER = False
"""True: compile every kernel through our cache and launch it through libcuda, like those of a bundle."""

_LAUNCHED_BY_TRITON = (
    f"Triton {triton.__version__} launches kernels itself, with more host time at each call than the launcher that is "
    "known here, that of 3.6 (docs/versions.md)."
)
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

# Triton's compiler is not documented as thread-safe, and a compiled kernel has a launcher before its function is loaded
_preparing = threading.RLock()


class _Ready(NamedTuple):
    """A specialisation on one device, ready to launch.

    Called as `launch(x, y, z, stream, function, *head, *parameters)`.  positions: indices of the parameters among
    arguments and constants, None for all.  replayable: can a tape replay it? ~ scratch_bytes: per program, for the
    tensor descriptors it makes; Triton's Python launcher allocates them itself.
    """

    launch: Any
    function: Any
    head: tuple[Any, ...]
    positions: tuple[int, ...] | None = None
    replayable: bool = True
    scratch_bytes: int = 0

    def parameters(self, args: tuple[Any, ...], programs: int, device: torch.device) -> tuple[Any, ...]:
        """The launcher's parameters: those of `args` that it takes, then Triton's two scratch pointers."""
        if self.positions is None:
            return args
        memory = scratch((self.scratch_bytes * programs,), torch.int8, device) if self.scratch_bytes else 0
        return (*[args[i] for i in self.positions], memory, 0)


class TritonKernel:
    """A `triton.jit` function whose constexpr parameters all come last.

    `kernel(grid, args, constants, num_warps=, num_stages=)`: `args` are the run-time arguments in order, `constants`
    the constexpr values in order.  The launch uses the device of the first tensor in `args` and its current stream.
    options: of Triton's compiler.  A product and a sum become one fused instruction unless `enable_fp_fusion` is False,
    whatever this version of Triton does by default.  `launch_pdl`, from sm_90 on, is what `CudaKernel` calls dependent.
    """

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn, self._options = fn, {"enable_fp_fusion": True, **options}
        self._ready: dict[tuple[Any, ...], _Ready] = {}
        self._direct = isinstance(fn, JITFunction) and torch.version.hip is None and triton_compile.SUPPORTED

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        collector = collecting()
        if collector is not None:
            self._collect(collector, args, constants, num_warps, num_stages)
            return
        device = args[0].device
        index = device.index if device.type == "cuda" else None
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, args, constants, num_warps=num_warps, num_stages=num_stages)
            return
        tape = taping()
        if not self._direct or index is None or _hooked():
            if tape is not None:
                tape.invalidate()
            if index is not None and torch.version.hip is None and not triton_compile.SUPPORTED:
                log_once("triton's launcher", _LAUNCHED_BY_TRITON, logging.INFO)
            self.fn[grid](*args, *constants, num_warps=num_warps, num_stages=num_stages, **self._options)
            return
        key = (index, num_warps, num_stages, constants, *map(_specialise, args))
        ready = self._ready.get(key)
        if ready is None:
            with _preparing:
                ready = self._ready.get(key)
                if ready is None:
                    ready = self._ready[key] = self._prepare(index, grid, args, constants, num_warps, num_stages)
        x, y, z = (*grid, 1, 1)[:3]
        parameters = ready.parameters((*args, *constants), x * y * z, device)
        stream = _current_stream(index)
        if ready.positions is None:
            ready.launch(x, y, z, stream, ready.function, *ready.head, *parameters)
        else:
            pointers = [p.data_ptr() if isinstance(p, torch.Tensor) else p for p in parameters]
            ready.launch(x, y, z, stream, ready.function, *ready.head, *pointers)
        if tape is not None:
            tape.add(
                Step(ready.launch, (x, y, z), ready.function, ready.head, parameters) if ready.replayable else None
            )

    def compile(
        self, arch: str, args: tuple[Any, ...], constants: tuple[Any, ...], *, num_warps: int, num_stages: int = 1
    ) -> Artifact:
        """The binary that a call with these arguments launches on `arch`, from the cache or compiled, on any machine.

        Tensors may be fake; their pointers count as multiples of 16.
        """
        return cache.get(*self._request(arch, triton_compile.aligned(args), constants, num_warps, num_stages))

    def _request(
        self, arch: str, args: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, num_stages: int
    ) -> triton_compile.Request:
        options = {"num_warps": num_warps, "num_stages": num_stages, **self._options}
        return triton_compile.request(self.fn, arch, args, constants, **options)

    def _collect(
        self, collector: Collector, args: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, num_stages: int
    ) -> None:
        key, build = self._request(collector.arch, triton_compile.aligned(args), constants, num_warps, num_stages)
        collector.add(self.fn.__name__, functools.partial(cache.get, key, build), key)

    def _prepare(
        self,
        index: int,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> _Ready:
        """Take the kernel from our cache, or let Triton compile it."""
        if _launchable() and triton_compile.stock() and (OWN_LAUNCHER or not current().jit_rebuild):
            key, build = self._request(arch(index), args, constants, num_warps, num_stages)
            artifact = cache.get(key, build) if OWN_LAUNCHER else cache.find(key)
            if artifact is not None:
                return self._bind(artifact, index)
        options = {"num_warps": num_warps, "num_stages": num_stages, **self._options}
        return _of_triton(self.fn.run(*args, *constants, grid=grid, warmup=True, **options))

    def _bind(self, artifact: Artifact, index: int) -> _Ready:
        info = artifact.info
        launch = driver.Launch(
            driver.load(artifact.binary, index, info["symbol"]),
            info["signature"],
            block=(32 * info["num_warps"], 1, 1),
            shared_bytes=info["shared_bytes"],
            dependent=info.get("dependent", False),
        )
        positions = tuple(self.fn.arg_names.index(name) for name in info["parameters"])
        return _Ready(launch, None, (), positions, scratch_bytes=info.get("scratch_bytes", 0))


@functools.cache
def _launchable() -> bool:
    """Can cached kernels be launched here?  They need cuda-core."""
    try:
        return find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # there is no package `cuda`
        return False


def _specialise(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.dtype, a.data_ptr() & 15 == 0
    if type(a) is int:
        return (a == 1, a & 15 == 0, not _INT32_MIN <= a <= _INT32_MAX)
    return type(a)


def _hooked() -> bool:
    """Is a profiler listening to launches?"""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def _of_triton(compiled: Any) -> _Ready:
    """Triton's C launcher, called directly.

    If the kernel needs scratch memory that Triton's Python launcher allocates, that one is called, and a tape cannot
    replay it.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        return _Ready(run, function, (packed, None, None, None), replayable=False)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    return _Ready(run.launch, function, (*flags, None, None, packed, None, None, None))


def target_of(t: Tensor) -> str:
    """The architecture that a kernel on `t` is compiled for: "sm_90", "gfx942"; "cpu" in the interpreter.

    For a tensor without memory it is that of the collector, or of the driver that was set in Triton.
    """
    collector = collecting()
    if collector is not None:
        return collector.arch
    active = triton.runtime.driver._active if t.is_meta else None
    if active is None:
        return arch(t.device)
    target = active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch
