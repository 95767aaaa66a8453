"""Launch Triton kernels with a host path of a few microseconds.

`kernel[grid](...)` binds the signature, specialises every argument and hashes the options on each call.
`TritonKernel` does that once per specialisation, keeps the `CompiledKernel`, and afterwards hands the arguments
straight to its launcher.

The key repeats what Triton 3.6 specialises on for NVIDIA: a pointer's dtype and 16-byte alignment; an integer being 1,
a multiple of 16, or wider than 32 bits.  Everything else (the interpreter, a driver that only compiles, AMD with its
pointer ranges, profiler launch hooks) takes Triton's own path.
"""

from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from tilewright.jit.tape import Step, taping

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_INT32_MAX = 2**31 - 1


class TritonKernel:
    """A `triton.jit` function whose constexpr parameters all come last.

    `kernel(grid, args, constants, num_warps=, num_stages=)`: `args` are the run-time arguments in order, `constants`
    the constexpr values in order.  The first tensor in `args` decides the device; the current stream of that device is
    used.
    """

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn, self._options = fn, options
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = isinstance(fn, JITFunction) and torch.version.hip is None

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        device = args[0].device
        tape = taping()
        if not (self._direct and device.type == "cuda") or _hooked():
            if tape is not None:
                tape.spoil()
            self._through_triton(grid, args, constants, num_warps, num_stages)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, args, constants, num_warps=num_warps, num_stages=num_stages)
            return
        key = (index, num_warps, num_stages, constants, *map(_specialise, args))
        compiled = self._compiled.get(key)
        x, y, z = (*grid, 1, 1)[:3]
        if compiled is None:
            compiled = self._compiled[key] = self._through_triton(grid, args, constants, num_warps, num_stages)
        else:
            stream = _current_stream(index)  # type: ignore[misc]
            compiled.run(
                x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants
            )
        if tape is not None:
            launch, head = _bare_launch(compiled)
            tape.add(Step(launch, (x, y, z), compiled.function, head, (*args, *constants)) if launch else None)

    def _through_triton(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, num_stages: int
    ) -> Any:
        return self.fn[grid](*args, *constants, num_warps=num_warps, num_stages=num_stages, **self._options)


def _specialise(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.dtype, a.data_ptr() & 15 == 0
    if type(a) is int:
        return (a == 1, a & 15 == 0, a > _INT32_MAX)
    return type(a)


def _hooked() -> bool:
    """Is a profiler listening to launches?"""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def _bare_launch(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Triton's C launcher without its Python shell, and the arguments between function and kernel parameters.

    (None, ()) where this Triton keeps it elsewhere, or the kernel needs scratch memory that the shell would allocate.
    """
    run = compiled.run
    fields = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if not all(hasattr(run, f) for f in fields) or run.global_scratch_size or run.profile_scratch_size:
        return None, ()
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    return run.launch, (*flags, None, None, compiled.packed_metadata, None, None, None)
