"""Small CUDA C++ kernels for test_jit.py, each for one thing that the proof kernels of jit/selftest leave out."""

from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.jit.cuda_launch import CudaKernel

KERNELS = Path(__file__).parent / "kernels"
HOPPER = ("sm_90a",)


class Scale(NamedTuple):
    kThreads: int
    Element: torch.dtype


class Side(NamedTuple):
    kSide: int


class Product(NamedTuple):
    Element: torch.dtype


scale = CudaKernel(KERNELS / "scale.cuh", "scale", "PPfd?iq", archs=("sm_80", "sm_90", "sm_100", "sm_120"))
share_tile = CudaKernel(KERNELS / "share_tile.cuh", "share_tile", "TTi", archs=HOPPER)
product_mn = CudaKernel(KERNELS / "product_mn.cuh", "product_mn", "TTP", archs=HOPPER)
