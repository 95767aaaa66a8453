"""Persistent GEMM in Triton: the portable form, for any strides, alignment and sizes, on NVIDIA and AMD.

As many programs as the GPU holds at one time walk over the output tiles in bands, so that tiles in flight share rows of
A and columns of B in L2; the walk and the loop along K are one flattened loop, so that the loads of the next tile run
under the epilogue of the last.  Operands come through pointers and masks or, where the bucket is aligned and the GPU
has a copy engine (sm_90 and later), through tensor descriptors.  Few rows make too few tiles to fill a GPU: there K is
split, each part leaves a float32 partial product, and a second launch adds them in a fixed order.

2*M*N*K flops; (M*K + K*N) * itemsize + M*N*itemsize_out bytes.  8192^3 in bf16 cannot beat 1.11 ms at 989 TFLOP/s,
16x4096x7168 not 14 us at 4.2 TB/s.
"""

import re
from contextvars import copy_context
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.hardware import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.engines.tile_triton_kernel import gemm_kernel, reduce_kernel
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b

FILL = 128  # tiles that keep a large GPU busy; the configuration may not depend on the GPU at hand
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "cpu": 227 << 10,  # the interpreter stands for an H200
}
SHARED_ELSEWHERE = 99 << 10  # sm_86, sm_89, sm_120
REDUCE_M, REDUCE_N = 4, 256  # of a program that adds up partial products


class Config(NamedTuple):
    """block_m, block_n, block_k: elements of a tile; block_n counts columns of op(B), two for each of a gated result.

    band: tile rows walked together.   descriptors: copy engine where there is one.   splits: parts of K, 1 for none.
    num_stages is what an H200 gets; less where shared memory is smaller.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int
    descriptors: bool
    splits: int


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The largest tile that still gives FILL tiles; for up to 64 rows narrow tiles, and K split until there are FILL.

    Operands that are not aligned are read element by element, which takes an address a register pair: smaller tiles.
    float32 has no matrix instruction on NVIDIA that keeps its precision: products of scalars, in tiles of 64x64.
    """
    m, n, k, _, is_aligned, _, _ = bucket
    if dtype.itemsize == 4:
        return Config(16, 64, 32, 4, 3, 8, False, 1) if m <= 16 else Config(64, 64, 16, 4, 3, 8, False, 1)
    if m <= 64:
        # Rows beyond M cost no traffic.  128 along K: what counts is bytes in flight
        rows, tiles, splits = 16 if m <= 16 else 64, -(-n // 64), 1
        while splits < 8 and 2 * splits * tiles <= FILL + 4 and k >= 1024 * splits:
            splits *= 2
        return (
            Config(rows, 64, 128, 4, 4, 8, True, splits) if is_aligned else Config(rows, 64, 64, 4, 3, 8, False, splits)
        )
    deep = 128 // dtype.itemsize  # one row of the copy engine's swizzle
    tiles = -(-m // 128) * -(-n // 128)
    if not is_aligned:
        return Config(64, 64, 32, 4, 3, 8, False, 1) if tiles < FILL else Config(128, 128, 32, 8, 3, 8, False, 1)
    if tiles < FILL:
        return Config(64, 128, deep, 4, 4, 8, True, 1)
    if tiles < 3 * FILL or dtype.itemsize == 1:
        # Partial sums of float8 need registers of their own: no room for 256 columns
        return Config(128, 128, deep, 8, 4, 8, True, 1)
    return Config(128, 256, deep, 8, 4, 8, True, 1)


def configured(*dtypes: torch.dtype) -> tuple[Config, ...]:
    """All that `configure` can return for operands of `dtypes`."""
    powers = [1 << i for i in range(6, 15)]
    sizes = product((1, 64, 128, 1024, 4096), powers, powers, (0, 1))
    buckets = [(m, n, k, 0, is_aligned, 16, 0) for m, n, k, is_aligned in sizes]
    return tuple(dict.fromkeys(configure(bucket, dtype) for bucket in buckets for dtype in dtypes))


CONFIGS = configured(torch.bfloat16, torch.float32)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles of up to 128x256 or 256x128 whose accumulator leaves half of the registers free; at most 64 of them."""
    m, _, k, _, is_aligned, _, _ = bucket
    deep = 128 // dtype.itemsize
    if dtype.itemsize == 4:
        exact = ((16, 64, 32, 4), (32, 64, 32, 4), (64, 32, 32, 4), (64, 64, 16, 4), (64, 64, 32, 4), (64, 64, 32, 8))
        return tuple(Config(*tile, stages, 8, False, 1) for tile in exact for stages in (2, 3))
    forms = (True, False) if is_aligned else (False,)
    if m <= 64:
        space = product((32, 64, 128), (deep, 2 * deep), (4, 6), forms, (1, 2, 4, 8))
        rows = max(m, 16)
        return tuple(
            Config(rows, n, block_k, 4, stages, 8, form, splits)
            for n, block_k, stages, form, splits in space
            if stages * (rows + n) * block_k * dtype.itemsize <= 160 << 10
            and (splits == 1 or k >= 4 * splits * block_k)
        )[:64]
    tiles = [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)]
    if dtype.itemsize == 2:
        tiles += [(64, 256, 4), (128, 256, 8), (256, 128, 8)]
    return tuple(
        Config(*tile[:2], deep, tile[2], stages, band, form, 1)
        for tile, stages, band, form in product(tiles, (3, 4), (4, 8), forms)
    )


def refusal(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Only what Triton's language lacks on a GPU."""
    arch = _target(a)
    if a.dtype is torch.float8_e4m3fn and re.fullmatch(r"sm_8[0-8]", arch):
        return f"multiplies float8_e4m3fn from sm_89 on, and this is {arch}"
    return None


_gemm = TritonKernel(gemm_kernel)
_reduce = TritonKernel(reduce_kernel)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d (B, M, N_out) = act(alpha * scale * a (B, M, K) @ b (B, K, N) + bias) + c; see the package's docstring."""
    batch, m, k = a.shape
    n = b.shape[2]
    blocks = triton.cdiv(k, config.block_k)
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))  # no part of K is empty
    c_strides = (0, 0, 0) if c is None else c.stride()
    finish = (bias, c, scale, alpha)
    finish_strides = (0 if bias is None else bias.stride(0), *c_strides)
    if splits == 1:
        _multiply(d, a, b, finish, finish_strides, activation, 1, config)
        return
    partials = scratch((splits * batch, m, n), torch.float32, d.device)
    _multiply(partials, a, b, (None, None, None, 1.0), (0, 0, 0, 0), "", splits, config)
    grid = (batch * triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
    wide = _wide(d, c)
    args = (d, partials, *finish, batch, m, n, splits, *d.stride()[:2], *finish_strides)
    _reduce(grid, args, (activation, wide, REDUCE_M, REDUCE_N), num_warps=4)


def _multiply(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    finish: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    finish_strides: tuple[int, ...],
    activation: str,
    splits: int,
    config: Config,
) -> None:
    """One launch of the GEMM; `d` has a batch for each part of K."""
    batch, m, k = a.shape
    n, c = b.shape[2], finish[1]
    arch = _target(a)
    a_major, b_major = major_a(a), major_b(b)
    strides, descriptors = (*d.stride()[:2], *a.stride(), *b.stride()), False
    # The bucket speaks of a and b; d may be strided by its caller, or hold partial products of odd rows
    expressible = a_major is not None and b_major is not None and all(map(copyable, (d, a, b)))
    if config.descriptors and expressible and _has_descriptors(arch):
        a_pitch, b_pitch = _pitches(a, 1 if a_major is Major.K else 2), _pitches(b, 2 if b_major is Major.K else 1)
        strides, descriptors = (*_pitches(d, 1), *a_pitch, a_pitch[1], *b_pitch, b_pitch[1]), True
    fit = _fit(config, arch, a.element_size(), d.element_size(), c, activation)
    config = fit.config
    tiles = splits * batch * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (max(1, min(tiles, fit.programs * usable_sms(a.device))),)
    args = (d, a, b, *finish, batch, m, n, k, splits, *strides, *finish_strides)
    constants = (
        activation, descriptors, a_major is Major.K, b_major is Major.K,
        _vector(a, k if a_major is Major.K else m), _vector(b, k if b_major is Major.K else n),
        _vector_c(c), _vector(d, d.shape[2]),
        splits > 1, k % config.block_k == 0, _wide(d, a, b, c), config.band, fit.parts, *config[:3],
    )  # fmt: skip
    # Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force
    context = copy_context()
    context.run(triton.set_allocator, _allocate)
    context.run(_gemm, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _target(t: Tensor) -> str:
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


def _has_descriptors(arch: str) -> bool:
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def _pitches(t: Tensor, rows: int) -> tuple[int, int]:
    """Strides of the batch and of dimension `rows`; a dimension of one element has none: made up."""
    columns, unit = t.shape[3 - rows], 16 // t.element_size()
    pitch = t.stride(rows) if t.shape[rows] > 1 else triton.cdiv(columns, unit) * unit
    return (t.stride(0) if t.shape[0] > 1 else t.shape[rows] * pitch), pitch


def _vector(t: Tensor, size: int) -> int:
    """Elements of 16 bytes if `t`, whose contiguous dimension is of `size`, is made of such; else 1."""
    elements = 16 // t.element_size()
    return elements if size % elements == 0 and copyable(t) else 1


def _vector_c(c: Tensor | None) -> int:
    """`_vector` of c, which may be strided along its columns."""
    return 1 if c is None or c.stride(2) != 1 else _vector(c, c.shape[2])


def _wide(*tensors: Tensor | None) -> bool:
    """Do offsets inside a tile, of 256 rows or columns, need 64 bits?"""
    return any(512 * max(t.stride()[1:]) > 2**31 - 1 for t in tensors if t is not None)


class _Fit(NamedTuple):
    """config: with the stages, and at need the narrower tile, that one GPU has room for.   parts: of the columns of a
    tile, finished one after another.   programs: that an SM holds at one time.
    """

    config: Config
    parts: int
    programs: int


def _fit(config: Config, arch: str, itemsize: int, out_itemsize: int, c: Tensor | None, activation: str) -> _Fit:
    """`config` within the shared memory of `arch`, next to what the epilogue needs of it.

    On NVIDIA 64 columns are finished at a time: a whole tile needs more registers than there are, and a staging in
    shared memory that costs a stage.  AMD stores straight from the accumulator, unless there is more to do than a bias.
    """
    shared = SHARED_BYTES.get(arch, SHARED_ELSEWHERE)
    amd = arch.startswith("gfx")
    direct = amd and c is None and not activation
    odd_c = c is not None and _vector_c(c) == 1  # then it is the accumulator that changes its layout
    staged = 4 if amd else out_itemsize + (4 if odd_c else 0 if c is None else c.element_size())
    # Before sm_90, and on AMD, a warp multiplies from registers, which hold the oldest stage
    in_registers = 0 if _has_descriptors(arch) else 1
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
    return _Fit(config._replace(num_stages=stages, block_n=block_n), parts, max(1, shared // needed))
