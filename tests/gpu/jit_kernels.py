"""Small CUDA C++ kernels for test_jit.py, each for one thing that the proof kernels of jit/selftest leave out."""

from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.jit.compilers.kernel_args import F32, F64, I32, I64, Map, Pointer
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


class ScaleArgs(NamedTuple):
    x: Pointer
    y: Pointer
    factor: F32
    shift: F64
    add: bool
    n: I32
    offset: I64


class ShareArgs(NamedTuple):
    source: Map
    sum: Map
    distance: I32


class ProductArgs(NamedTuple):
    map_a: Map
    map_b: Map
    d: Pointer


scale = CudaKernel(KERNELS / "scale.cuh", "scale", ScaleArgs, archs=("sm_80", "sm_90", "sm_100", "sm_120"))
share_tile = CudaKernel(KERNELS / "share_tile.cuh", "share_tile", ShareArgs, archs=HOPPER)
product_mn = CudaKernel(KERNELS / "product_mn.cuh", "product_mn", ProductArgs, archs=HOPPER)
