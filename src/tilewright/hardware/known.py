"""Sizes of GPUs that are not here, one for each architecture, so that kernels can be planned and compiled without one.

What a kernel is specialised on may depend on them: a kernel that walks over its rows takes its number of programs from
the number of processors.  Numbers are of the GPU named; others of that architecture may choose other kernels.
"""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """As torch reports it; sizes in bytes."""

    name: str
    processors: int
    l2_bytes: int
    memory_bytes: int


GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", 108, 40 << 20, 80 << 30),
    "sm_89": Gpu("NVIDIA L40S", 142, 96 << 20, 48 << 30),
    "sm_90": Gpu("NVIDIA H200", 132, 60 << 20, 141 << 30),
    "sm_100": Gpu("NVIDIA B200", 148, 126 << 20, 180 << 30),
    "sm_120": Gpu("NVIDIA GeForce RTX 5090", 170, 96 << 20, 32 << 30),
    "gfx942": Gpu("AMD Instinct MI300X", 304, 4 << 20, 192 << 30),
    "gfx950": Gpu("AMD Instinct MI355X", 256, 4 << 20, 288 << 30),
}


def machine(arch: str) -> str:
    """The machine that code for `arch` runs on: "sm_90" for "sm_90a", "sm_100" for "sm_100f"; others are themselves."""
    return re.sub(r"^(sm_\d+)[af]$", r"\1", arch)
