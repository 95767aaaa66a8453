"""Tiles of the Triton GEMMs: their configuration, and what fits each GPU."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.ops.gemm.operands import copyable

SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "cpu": 227 << 10,  # the interpreter simulates an H200
}
SHARED_ELSEWHERE = 99 << 10  # sm_86, sm_89, sm_120


class Config(NamedTuple):
    """block_m, block_n, block_k: elements of a tile; block_n counts columns of op(B), two for each of a gated result.
    block_m = 1: FMAs (`single_row.py`), without group_m, descriptors and splits.

    group_m: tile rows in a group of the tile order (GROUP_SIZE_M).  descriptors: TMA if there is one.  splits: parts of
    K, 1 for none.  num_stages is what an H200 gets; less where shared memory is smaller.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    descriptors: bool
    splits: int


def allocate_descriptors(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocates the memory of a launch's descriptors, for `triton.set_allocator`."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def has_descriptors(arch: str) -> bool:
    """Returns whether Triton's tensor descriptors use TMA on `arch`."""
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def pitches(t: Tensor, rows: int) -> tuple[int, int]:
    """Returns the strides of the batch and of dimension `rows`; for a dimension of one element any valid stride."""
    columns, unit = t.shape[3 - rows], 16 // t.element_size()
    pitch = t.stride(rows) if t.shape[rows] > 1 else triton.cdiv(columns, unit) * unit
    return (t.stride(0) if t.shape[0] > 1 else t.shape[rows] * pitch), pitch


def vector_width(t: Tensor, size: int) -> int:
    """Returns the elements in 16 bytes if `t`, whose contiguous dimension has `size`, can be read so; else 1."""
    elements = 16 // t.element_size()
    return elements if size % elements == 0 and copyable(t) else 1


def vector_width_of_c(c: Tensor | None) -> int:
    """Returns `vector_width` of c, which may be strided along its columns."""
    return 1 if c is None or c.stride(2) != 1 else vector_width(c, c.shape[2])


def needs_wide_offsets(*tensors: Tensor | None, reach: int = 256) -> bool:
    """Returns whether offsets inside a tile of at most `reach` rows or columns need 64 bits."""
    return any(2 * reach * max(t.stride()[1:]) > 2**31 - 1 for t in tensors if t is not None)


class Fit(NamedTuple):
    """config: the stages, and if needed the narrower tile, that fit a GPU.   parts: how many parts of the columns the
    epilogue takes in turn.   programs: how many an SM holds at once.
    """

    config: Config
    parts: int
    programs: int


def fitted(config: Config, arch: str, itemsize: int, out_itemsize: int, c: Tensor | None, activation: str) -> Fit:
    """Fits `config` into the shared memory of `arch`, with what the epilogue needs of it.

    On NVIDIA the epilogue takes 64 columns at a time: a whole tile needs too many registers, and staging in shared
    memory that costs a stage.  AMD stores from the accumulator unless the epilogue does more than add a bias.
    """
    shared = SHARED_BYTES.get(arch, SHARED_ELSEWHERE)
    amd = arch.startswith("gfx")
    direct = amd and c is None and not activation
    odd_c = c is not None and vector_width_of_c(c) == 1  # then the accumulator is converted to the layout of c
    staged = 4 if amd else out_itemsize + (4 if odd_c else 0 if c is None else c.element_size())
    # Before sm_90, and on AMD, operands come from registers, which hold the oldest stage
    in_registers = 0 if has_descriptors(arch) else 1
    most = min(config.num_stages, 3) if amd else config.num_stages  # its scalar registers hold three
    block_n = config.block_n
    if in_registers and staged == 8:
        block_n = min(block_n, 128)  # with a float32 c for a float32 result the registers are too few for 256 columns
    while True:
        stage = (config.block_m + block_n) * config.block_k * itemsize
        columns = block_n if amd and odd_c else min(block_n, 64)
        staging = 0 if direct else config.block_m * columns * staged
        stages = min(most, (shared - staging) // stage + in_registers)
        if stages >= 2 or block_n <= 64:
            break
        block_n //= 2
    stages = max(stages, 1)
    needed = max((stages - in_registers) * stage + staging, stage)
    parts = 1 if direct else -(-block_n // 64)
    return Fit(config._replace(num_stages=stages, block_n=block_n), parts, max(1, shared // needed))
