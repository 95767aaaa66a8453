"""Products of different shapes in Triton, group_gemm: one persistent launch over the tiles of all of them.

A table on the device holds addresses and sizes, 80 bytes a problem.  The host writes it by launches of one program
each, with the numbers as parameters: no copy, so no synchronization, and a CUDA graph records them.  The GEMM launch
finds the problem of a tile as `grouped_rows.py` finds its group.

Two flops a product of elements; operands once, results once.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.group_gemm import FORWARD, GroupGemmArgs, GroupGemmBucket
from tilewright.ops.gemm.kernels.triton import tiles as tiling
from tilewright.ops.gemm.kernels.triton.group_gemm_kernel import FIELDS, group_gemm_kernel, problem_kernel
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b

GROUPS = 64  # problems whose sizes are read at once
UNIT = 16  # elements: where results begin, see `group_gemm`


class Config(NamedTuple):
    """block_m, block_n, block_k: elements of a tile.  group_m: tile rows in a group of the tile order."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int


def configure(bucket: GroupGemmBucket, dtype: torch.dtype) -> Config:
    """Chooses by the largest problem: tiles of 128x128, or 64x64 for small ones and for float32."""
    if dtype.itemsize == 4:
        return Config(64, 64, 16, 8, 3, 8)
    return Config(64, 64, 64, 4, 3, 8) if min(bucket.M, bucket.N) <= 256 else Config(128, 128, 32, 8, 4, 8)


CONFIGS = (Config(64, 64, 16, 8, 3, 8), Config(64, 64, 64, 4, 3, 8), Config(128, 128, 32, 8, 4, 8))


def candidates(bucket: GroupGemmBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of up to 128x128."""
    if dtype.itemsize == 4:
        return tuple(Config(m, 64, 16, 4, stages, 8) for m in (32, 64) for stages in (2, 3))
    tiles = ((64, 64, 64, 4), (64, 128, 64, 4), (128, 128, 32, 8), (128, 128, 64, 8))
    return tuple(Config(*tile, stages, 8) for tile, stages in product(tiles, (3, 4)))


_table = TritonKernel(problem_kernel)
_gemm = TritonKernel(group_gemm_kernel)


def gemm(d: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], config: Config) -> None:
    """Writes the products a[i] (M, K) @ b[i] (K, N) to d, contiguous, each at a multiple of UNIT elements."""
    groups = len(a)
    table = scratch((groups, FIELDS.value), torch.int64, d.device)
    d_offset = tiles = 0
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        (m, k), n = left.shape, right.shape[1]
        sizes = (d_offset, m, n, k, *left.stride(), *right.stride())
        gap = -m * n % UNIT if i + 1 < groups else 0
        _table((1,), (table, i, d, gap, left, right, *sizes), (UNIT,), num_warps=1)
        d_offset += m * n + gap
        tiles += triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    a_unit, b_unit = _common(map(major_a, a)), _common(map(major_b, b))
    vector = 16 // a[0].element_size()
    if not (
        a_unit and b_unit and all(_vectors(x, major_a(x), y, major_b(y), vector) for x, y in zip(a, b, strict=True))
    ):
        vector = 1
    wide_offsets = any(512 * max(t.stride()) > 2**31 - 1 for t in (*a, *b, *(y.mT for y in b)))
    fit = tiling.fitted(_dense(config), target_of(d), a[0].element_size(), d.element_size(), None, "")
    grid = (max(1, min(tiles, fit.programs * usable_sms(d.device))),)
    parts = min(fit.parts, 2)
    constants = (a_unit, b_unit, vector, wide_offsets, GROUPS, config.group_m, parts, *fit.config[:3])
    _gemm(grid, (d, table, a[0], groups), constants, num_warps=config.num_warps, num_stages=fit.config.num_stages)


def _common(majors: object) -> str:
    """Returns the dimension of unit stride of all matrices; "" if they differ."""
    majors_found = set(majors)  # type: ignore[call-overload]
    return {Major.K: "K", Major.MN: "MN"}[majors_found.pop()] if len(majors_found) == 1 else ""


def _vectors(a: Tensor, major_of_a: Major | None, b: Tensor, major_of_b: Major | None, elements: int) -> bool:
    """Returns whether both can be read in vectors of 16 bytes along their unit stride."""
    along = (a.shape[1] if major_of_a is Major.K else a.shape[0], b.shape[0] if major_of_b is Major.K else b.shape[1])
    return copyable(a) and copyable(b) and all(size % elements == 0 for size in along)


def _dense(config: Config) -> tiling.Config:
    return tiling.Config(*config, False, 1)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: GroupGemmArgs, config: Config) -> None:
    gemm(outs[0], args.lefts, args.rights, config)
