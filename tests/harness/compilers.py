"""No compiler: as on a machine that has none, and an error wherever one is called all the same."""

import gc
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tilewright.dispatch import contracts
from tilewright.jit import cache
from tilewright.jit.artifact import BuildKey
from tilewright.jit.cuda_launch import CudaKernel


def raise_in_every_compiler(patch: pytest.MonkeyPatch) -> list[str]:
    """From now on kernels come from the cache alone.  Returns the list in which those that are missing are named.

    What this process has loaded before is forgotten, and so are its plans.
    """
    import triton
    from triton.runtime.jit import JITFunction

    from tilewright.jit import cutile_launch, triton_launch
    from tilewright.jit.compilers import nvcc, nvrtc, tileiras

    missed: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"a compiler was called: {args}")

    for owner in (nvrtc.Nvrtc, nvcc.Nvcc, type(tileiras.compiler)):
        patch.setattr(owner, "version", lambda self: None)
        patch.setattr(owner, "compile", refuse)
    for owner, name in (
        (triton, "compile"),
        (triton.compiler, "compile"),
        (JITFunction, "run"),
        (JITFunction, "warmup"),
    ):
        patch.setattr(owner, name, refuse)

    def note(key: BuildKey, root: Path) -> str:
        missed.append(key.name)
        return f"{key.name} is missing"

    patch.setattr(cache, "_missing", note)
    patch.setattr(cutile_launch, "_compiler", lambda: "")  # which remembers versions
    for found in gc.get_objects():
        if isinstance(found, triton_launch.TritonKernel):
            found._ready.clear()
        elif isinstance(found, CudaKernel):
            found._plans.clear()
            found._loaded.clear()
        elif isinstance(found, cutile_launch.CutileKernel):
            found._launches.clear()
    for contract in contracts().values():
        for raw in contract.raw_ops:
            raw.forget_plans()
    return missed
