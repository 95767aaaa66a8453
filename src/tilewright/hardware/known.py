"""Sizes of one GPU per architecture, so that kernels can be planned and compiled on a machine without a GPU.

Specialisations may depend on them: a persistent kernel takes its number of programs from the number of SMs.  The
numbers are those of the named GPU; another GPU of that architecture may get other kernels.
"""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """Properties of a GPU as torch reports them; sizes in bytes."""

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
    """The machine that code for `arch` runs on: "sm_90" for "sm_90a", "sm_100" for "sm_100f"; else `arch` itself."""
    return re.sub(r"^(sm_\d+)[af]$", r"\1", arch)
