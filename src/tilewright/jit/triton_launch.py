"""Launch Triton kernels with a host path of a few microseconds.

`kernel[grid](...)` binds the signature, specialises every argument and hashes the options on each call.  `TritonKernel` does
that once per specialisation, keeps the `CompiledKernel`, and afterwards hands the arguments straight to its launcher.

The key repeats what Triton 3.6 specialises on for NVIDIA: a pointer's dtype and 16-byte alignment; an integer being 1, a
multiple of 16, or wider than 32 bits.  Everything else (the interpreter, a driver that only compiles, AMD with its pointer
ranges, profiler launch hooks) takes Triton's own path.
"""

from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_INT32_MAX = 2**31 - 1


class TritonKernel:
    """A `triton.jit` function whose constexpr parameters all come last.

    `kernel(grid, args, constants, num_warps=, num_stages=)`: `args` are the run-time arguments in order, `constants` the
    constexpr values in order.  The first tensor in `args` decides the device; the current stream of that device is used.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = isinstance(fn, JITFunction) and torch.version.hip is None

    def __call__(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], *, num_warps: int, num_stages: int = 1
    ) -> None:
        device = args[0].device
        if not (self._direct and device.type == "cuda") or knobs.runtime.launch_enter_hook is not None:
            self._through_triton(grid, args, constants, num_warps, num_stages)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, args, constants, num_warps=num_warps, num_stages=num_stages)
        key = (index, num_warps, num_stages, constants, *map(_specialise, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._through_triton(grid, args, constants, num_warps, num_stages)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = _current_stream(index)  # type: ignore[misc]
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants
        )

    def _through_triton(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, num_stages: int
    ) -> Any:
        return self.fn[grid](*args, *constants, num_warps=num_warps, num_stages=num_stages)


def _specialise(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.dtype, a.data_ptr() & 15 == 0
    if type(a) is int:
        return (a == 1, a & 15 == 0, a > _INT32_MAX)
    return type(a)


def triton_version() -> str:
    """The version of the Triton that compiles our kernels."""
    return str(triton.__version__)
