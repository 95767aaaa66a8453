"""Proof that CUDA C++ kernels compile, load and compute correctly on this machine: two small kernels, exact results.

`tma_copy` copies ragged matrices with the TMA; `wgmma_tile` multiplies with the tensor cores.  Inputs are small
integers, so every sum is exact and results must agree bit for bit.  `tilewright doctor --selftest` runs them.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import TilewrightError
from tilewright.jit.compilers.kernel_args import I32, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map

_HERE = Path(__file__).parent
_SPAN = 128  # bytes of K in a stage of wgmma_tile


class Copy(NamedTuple):
    """Parameters of tma_copy."""

    kRows: int  # named as in the kernel
    kColumns: int
    kStages: int
    Element: torch.dtype


class Tile(NamedTuple):
    """Parameters of wgmma_tile."""

    kN: int
    kStages: int
    Element: torch.dtype
    Out: torch.dtype


class Proof(NamedTuple):
    """The result of one check: its name, the error (None: passed), the seconds including compilation."""

    name: str
    error: str | None
    seconds: float


class CopyArgs(NamedTuple):
    """Arguments of `tma_copy`."""

    source: Map
    target: Map
    rows: I32
    columns: I32


class TileArgs(NamedTuple):
    """Arguments of `wgmma_tile`."""

    map_a: Map
    map_b: Map
    map_d: Map
    d: Pointer
    m: I32
    n: I32
    k: I32


tma_copy = CudaKernel(_HERE / "tma_copy.cuh", "tma_copy", CopyArgs, archs=("sm_90a",))
wgmma_tile = CudaKernel(_HERE / "wgmma_tile.cuh", "wgmma_tile", TileArgs, archs=("sm_90a",))


def copy(x: Tensor, params: Copy, blocks: int = 0) -> Tensor:
    """A copy of `x` (M, N).  blocks: of the grid; default: one per SM."""
    y = torch.full_like(x, 77)
    box = (params.kRows, params.kColumns)
    blocks = blocks or torch.cuda.get_device_properties(x.device).multi_processor_count
    shared = params.kStages * params.kRows * params.kColumns * x.element_size()
    args = CopyArgs(tensor_map(x, box), tensor_map(y, box), *x.shape)
    tma_copy((blocks,), args, params, block=32, shared_bytes=shared)
    return y


def multiply(a: Tensor, b: Tensor, params: Tile) -> Tensor:
    """`a` (M, K) times the transpose of `b` (N, K), in `params.Out`."""
    (m, k), n = a.shape, b.shape[0]
    d = torch.full((m, n), 77, dtype=params.Out, device=a.device)
    width = _SPAN // a.element_size()
    maps = (
        tensor_map(a, (64, width), swizzle=_SPAN),
        tensor_map(b, (params.kN, width), swizzle=_SPAN),
        # The kernel stores a float result without the TMA; this map is unused, and its box would not fit the swizzle
        tensor_map(d, (64, 64), swizzle=_SPAN) if params.Out.itemsize == 2 else tensor_map(d, (64, 64)),
    )
    staged = 64 * params.kN * params.Out.itemsize if params.Out.itemsize == 2 else 0
    shared = params.kStages * (64 + params.kN) * _SPAN + staged
    grid = (-(-m // 64), -(-n // params.kN))
    wgmma_tile(grid, TileArgs(*maps, d, m, n, k), params, block=160, shared_bytes=shared)
    return d


def whole_numbers(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, largest: int = 4) -> Tensor:
    """Random integers from -largest to largest, the same in every call."""
    generator = torch.Generator().manual_seed(shape[0] * 8191 + shape[1])
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(torch.float32).to(device, dtype)


def _check_copy(shape: tuple[int, int], params: Copy, blocks: int) -> Callable[[torch.device], str | None]:
    def check(device: torch.device) -> str | None:
        x = whole_numbers(shape, params.Element, device, 100)
        return _difference(copy(x, params, blocks), x)

    return check


def _check_product(shape: tuple[int, int, int], params: Tile) -> Callable[[torch.device], str | None]:
    def check(device: torch.device) -> str | None:
        m, n, k = shape
        a, b = whole_numbers((m, k), params.Element, device), whole_numbers((n, k), params.Element, device)
        exact = a.double() @ b.double().T
        return _difference(multiply(a, b, params), exact.to(params.Out))

    return check


_bf16, _fp16, _fp32, _fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

# Shapes are ragged on purpose; K beyond kStages * 128 bytes goes round the pipeline more than once.
PROOFS: dict[str, Callable[[torch.device], str | None]] = {
    "tma_copy bf16 1000x520, many tiles a block": _check_copy((1000, 520), Copy(64, 64, 4, _bf16), 3),
    "tma_copy fp32 67x36": _check_copy((67, 36), Copy(32, 32, 2, _fp32), 0),
    "wgmma bf16 64x64x64, one stage": _check_product((64, 64, 64), Tile(64, 4, _bf16, _fp32)),
    "wgmma bf16 200x264x1000 to bf16": _check_product((200, 264, 1000), Tile(128, 4, _bf16, _bf16)),
    "wgmma bf16 100x300x520, N 256": _check_product((100, 300, 520), Tile(256, 3, _bf16, _fp32)),
    "wgmma fp16 64x8x72, N 8": _check_product((64, 8, 72), Tile(8, 2, _fp16, _fp32)),
    "wgmma e4m3 130x104x656 to fp16": _check_product((130, 104, 656), Tile(64, 4, _fp8, _fp16)),
}


def run(device: torch.device | str | int = "cuda") -> list[Proof]:
    """Run every proof on `device`.  A TilewrightError becomes the proof's error; others are raised."""
    gpu = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    return [_run(name, check, gpu) for name, check in PROOFS.items()]


def _run(name: str, check: Callable[[torch.device], str | None], device: torch.device) -> Proof:
    start = time.perf_counter()
    try:
        error = check(device)
    except TilewrightError as raised:
        error = str(raised)
    return Proof(name, error, time.perf_counter() - start)


def _difference(actual: Tensor, expected: Tensor) -> str | None:
    wrong = actual != expected
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, first ({row}, {column}): "
        f"{actual[row, column].item()} instead of {expected[row, column].item()}"
    )
