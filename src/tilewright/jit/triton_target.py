"""Which GPU a Triton kernel is compiled for."""

import triton
from torch import Tensor

from tilewright.hardware import device_info
from tilewright.jit.collect import collecting


def target_of(t: Tensor) -> str:
    """What a kernel on `t` is compiled for: "sm_90", "gfx942"; "cpu" in the interpreter.

    A tensor without memory belongs to whoever compiles: a collector, or the driver that Triton was given.
    """
    collector = collecting()
    if collector is not None:
        return collector.arch
    driver = triton.runtime.driver._active if t.is_meta else None
    if driver is None:
        return device_info(t.device).arch
    target = driver.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch
