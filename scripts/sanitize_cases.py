"""Small launches of every CUDA C++ kernel: `python scripts/sanitize_cases.py [--list] [NAME ...]`, all without a name.

A case launches a kernel and compares the result with float64; together they reach every part: rings that turn,
clusters, splits of K, all layouts, scalings and tile schedulers, epilogues, ragged edges.  Memory that must not be
written holds a number that no product gives.  `sanitize.py` runs each of them under compute-sanitizer.

Kernels that stay on the machine get `PROCESSORS` of it: so a block has several tiles one after another, and its ring
turns, although there are few of them, as a tool needs it that follows every access to shared memory.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from sanitize_attention import ATTENTION_RUNS
from sanitize_loss import LOSS_RUNS
from sanitize_moe import MOE_RUNS
from sanitize_sampling import SAMPLING_RUNS
from sanitize_values import DEVICE, HALF, UNWRITTEN, drawn, near, unwritten
from torch import Tensor

from tilewright.hardware.sm_budget import set_sm_budget
from tilewright.jit import selftest
from tilewright.ops.gemm.dense.args import MatmulArgs
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs
from tilewright.ops.gemm.kernels.sm90 import (
    cost_model,
    dense,
    dense_kernel,
    few_rows,
    few_rows_grouped,
    few_rows_scaled,
    fp8,
    fp8_cost_model,
    fp8_kernel,
)
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.operands import apply_epilogue, columns_out
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs, plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.quant.kernels.sm90 import per_tensor_cast
from tilewright.ops.quant.layout import TOKEN, ScaleLayout
from tilewright.ops.quant.numbers import restore
from tilewright.ops.quant.per_tensor_cast_to_fp8 import PerTensorCastArgs
from tilewright.ops.quant.per_tensor_cast_to_fp8 import reference as cast_reference
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import weight_only_matmul as weight_only
from tilewright.ops.weight_only.kernels.sm90 import weight_only_model
from tilewright.ops.weight_only.samples import random_weight
from tilewright.ops.weight_only.weight_only_matmul import WeightOnlyMatmulArgs

PROCESSORS = 4
UNSCALED = model.UNSCALED
_FLOAT, _FP8, _DOUBLE = torch.float32, torch.float8_e4m3fn, torch.float64

# rows, columns, depth, layout, activation, result, config
_TILE = dense_kernel.Config(block_m=128, block_n=256, stages=4, cluster_m=1, cluster_n=1, group_m=4)
DENSE = (
    (300, 520, 584, "nt", "", HALF, _TILE),
    (300, 520, 584, "nn", "", HALF, _TILE._replace(block_n=144, cluster_m=2)),
    (296, 520, 584, "tn", "gelu", _FLOAT, _TILE._replace(block_n=128, cluster_n=2)),
    (296, 520, 584, "tt", "silu", HALF, _TILE._replace(block_m=64, block_n=96, stages=8, cluster_m=2)),
    (200, 512, 520, "nt", "swiglu", HALF, _TILE),
    (96, 520, 584, "nt", "gelu", HALF, _TILE._replace(block_n=96, stages=6, split=3)),
    (200, 520, 584, "nn", "", _FLOAT, _TILE._replace(block_m=64, block_n=128, stages=6, cluster_m=2, split=2)),
)
FEW_ROWS = (
    (1, 264, 1032, "nt", "", HALF, model.Config(tokens=8, stages=3, split=1, ctas=3)),
    (16, 264, 1032, "nt", "relu", _FLOAT, model.Config(tokens=16, stages=4, split=4, ctas=2)),
    (33, 264, 1160, "nn", "silu", HALF, model.Config(tokens=64, stages=5, split=8, ctas=1)),
    (64, 328, 264, "nt", "swiglu", HALF, model.Config(tokens=64, stages=5, split=2, ctas=1)),
)
# rows, columns, depth, scaling, activation, result, tile, in place
FP8 = (
    (600, 528, 1168, 2, "", HALF, (192, 128), False),
    (600, 528, 1168, 2, "", HALF, (256, 128), False),
    (300, 528, 1168, 2, "gelu", HALF, (192, 96), False),
    (300, 528, 1168, 2, "silu", HALF, (128, 192), False),
    (300, 1040, 640, 1, "swiglu", HALF, (128, 192), False),
    (300, 528, 640, 0, "", _FLOAT, (64, 96), False),
    (600, 528, 1168, 3, "", _FLOAT, (192, 128), True),
    (600, 528, 1168, 3, "", _FLOAT, (256, 112), False),
    (100, 528, 1168, 2, "", HALF, (128, 96, 1, 1, 3), False),
    (200, 528, 1168, 3, "", _FLOAT, (64, 128, 2, 1, 2), True),
)
# rows, columns, depth, activation, tile
REQUANTISED = ((300, 528, 640, "silu", (128, 128)), (300, 1088, 640, "swiglu", (128, 256)))
# rows, columns, depth, scaling, activation, tokens, split, blocks a multiprocessor
FEW_ROWS_SCALED = (
    (1, 264, 1040, 0, "", 8, 2, 2),
    (13, 264, 1040, 1, "relu", 16, 1, 2),
    (33, 264, 1552, 2, "", 64, 4, 1),
    (33, 264, 1040, 3, "swiglu", 64, 2, 1),
)
# rows of groups, columns, depth, scaling, masked, kernel, tile or (tokens, split, blocks)
GROUPED = (
    ((3, 0, 64, 1, 200, 0), 520, 328, UNSCALED, False, "dense", (128, 256, 1, 1)),
    ((20, 0, 64, 1, 63, 16), 520, 328, UNSCALED, True, "dense", (64, 128, 1, 2)),
    ((3, 0, 64, 1, 200, 0), 528, 384, 2, False, "fp8", (128, 128)),
    ((300, 0, 1, 64, 129), 528, 384, 2, True, "fp8", (192, 128)),
    ((3, 0, 64, 1, 200, 0), 528, 384, 2, False, "fp8", (256, 128)),
    ((3, 0, 17, 1, 40, 0), 264, 520, UNSCALED, False, "few_rows", (32, 2, 2)),
    ((3, 0, 17, 1, 40, 0), 264, 1040, 2, False, "few_rows", (16, 2, 2)),
    ((9, 0, 16, 16), 264, 528, 3, True, "few_rows", (16, 1, 1)),
)
# K of groups, rows, columns, scaling, tile, in place
ALONG_K = (
    ((1, 63, 0, 66, 500), 200, 264, UNSCALED, (128, 128, 1, 1), False),
    ((0, 77, 650, 0, 1), 384, 264, UNSCALED, (128, 128, 2, 1), True),
    ((128, 0, 384), 384, 272, 3, (192, 128), True),
    ((128, 0, 384), 600, 272, 3, (256, 96), False),
)
# rows, columns, dtype: of x, which 4 multiprocessors keep in part or whole
TENSOR_CASTS = ((16, 520, HALF), (1024, 1032, HALF), (900, 1028, _FLOAT))
# rows, columns, depth, bits, activation, (tokens, tiles, warps, split, blocks a multiprocessor)
WEIGHT_ONLY = (
    (1, 264, 1040, 8, "", (8, 2, 4, 4, 2)),
    (13, 264, 1056, 4, "gelu", (16, 2, 4, 2, 1)),
    (61, 256, 1056, 4, "swiglu", (64, 2, 4, 1, 1)),
)


def product(kernel: Any, m: int, n: int, k: int, layout: str, activation: str, dtype: torch.dtype, config: Any) -> bool:
    """16-bit operands, with a bias, an addend and a scale."""
    a, b = drawn(m, k, turned=layout[0] == "t"), drawn(k, n, turned=layout[1] == "t")
    bias, scale = drawn(n, dtype=_FLOAT), torch.full((1,), 0.5, device=DEVICE)
    c = drawn(m, columns_out(n, activation), dtype=dtype)
    d = unwritten(*c.shape, dtype=dtype)
    kernel.gemm(d[None], MatmulArgs(a[None], b[None], bias, c[None], scale, 0.1, activation, dtype), config)
    return near(d, apply_epilogue(0.05 * (a.double() @ b.double()), bias, c, activation, _DOUBLE))


def scaled_product(
    m: int,
    n: int,
    k: int,
    scaling: int,
    activation: str,
    dtype: torch.dtype,
    tile: tuple[int, ...],
    into: bool,
) -> bool:
    """e4m3 operands, with a bias and an addend, which is the result where `into`."""
    (a, of_a, x), (b, of_b, y) = _scaled(scaling, (1, m, k), (1, n, k))
    bias, c = drawn(n, dtype=_FLOAT), drawn(1, m, columns_out(n, activation), dtype=dtype)
    wanted = apply_epilogue(0.1 * (x @ y.mT), bias, c, activation, _DOUBLE)
    d = c if into else unwritten(*c.shape, dtype=dtype)
    args = ScaledMatmulArgs(a, b.mT, of_a, of_b, bias, c, 0.1, activation, dtype)
    fp8_kernel.gemm(d, args, _fp8_config(tile, scaling))
    return near(d, wanted)


def requantised(m: int, n: int, k: int, activation: str, tile: tuple[int, ...]) -> bool:
    """Results in e4m3 with scales: near the product as far as e4m3 goes."""
    (a, of_a, x), (b, of_b, y) = _scaled(Scaling.TOKEN_BLOCK, (1, m, k), (1, n, k))
    n_out = columns_out(n, activation)
    q, scales = torch.empty(1, m, n_out, dtype=_FP8, device=DEVICE), TOKEN.empty(m, n_out, DEVICE, 1)
    args = plain_scaled_args(a, b.mT, of_a, of_b, _FP8, activation)._replace(alpha=0.1)
    fp8_kernel.gemm_fp8(q, scales, args, _fp8_config(tile, Scaling.TOKEN_BLOCK))
    wanted = apply_epilogue(0.1 * (x @ y.mT), None, None, activation, _DOUBLE)
    return near(restore(q, scales, TOKEN, _FLOAT), wanted, 0.05)


def scaled_few_rows(m: int, n: int, k: int, scaling: int, activation: str, tokens: int, split: int, ctas: int) -> bool:
    """e4m3 operands, few rows, with a bias and an addend."""
    (a, of_a, x), (b, of_b, y) = _scaled(scaling, (1, m, k), (1, n, k))
    bias, c = drawn(n), drawn(1, m, columns_out(n, activation))
    d = unwritten(*c.shape)
    config = model.deepest(tokens, split, ctas, scaling)
    assert config is not None
    few_rows_scaled.gemm(d, ScaledMatmulArgs(a, b.mT, of_a, of_b, bias, c, 0.1, activation, d.dtype), config)
    return near(d, apply_epilogue(0.1 * (x @ y.mT), bias, c, activation, _DOUBLE))


def grouped(
    sizes: Sequence[int], n: int, k: int, scaling: int, masked: bool, name: str, shape: tuple[int, ...]
) -> bool:
    """Groups of rows, tightly packed or each in its own matrix; rows of none stay as they were."""
    groups, rows = len(sizes), max(sizes) + 5 if masked else sum(sizes) + 5
    (a, of_a, x), (b, of_b, y) = _scaled(scaling, (groups if masked else 1, rows, k), (groups, n, k))
    d = unwritten(a.shape[0], rows, n)
    ends = list(sizes) if masked else list(accumulate(sizes))
    kernel: Any
    config: Any
    if name == "few_rows":
        kernel, config = few_rows_grouped, model.deepest(shape[0], shape[1], shape[2], scaling, grouped=True)
    elif name == "dense":
        kernel, config = dense, _dense_config(shape)
    else:
        kernel, config = fp8, _fp8_config(shape, scaling)
    kernel.gemm_rows(d, GroupedArgs(a, b.mT, of_a, of_b, None, _int32(ends), max(sizes), "", d.dtype), config)
    wanted = torch.full_like(d, UNWRITTEN, dtype=_DOUBLE)
    for g, (start, end) in enumerate([(0, end) for end in ends] if masked else pairwise([0, *ends])):
        at = g if masked else 0
        wanted[at, start:end] = x[at, start:end] @ y[g].mT
    outside = wanted == UNWRITTEN
    return bool((d.double() == wanted)[outside].all()) and near(
        d.masked_fill(outside, 0), wanted.masked_fill(outside, 0)
    )


def along_k(sizes: Sequence[int], m: int, n: int, scaling: int, tile: tuple[int, ...], into: bool) -> bool:
    """Groups along K, ragged where 16-bit; `into`: added to the result by the copy engine."""
    ends = list(accumulate(sizes))
    (a, of_a, x), (b, of_b, y) = _scaled(scaling, (m, ends[-1]), (n, ends[-1]), turned=scaling == UNSCALED)
    c = drawn(len(sizes), m, n, dtype=_FLOAT)
    products = [x[:, start:end] @ y[:, start:end].mT for start, end in pairwise([0, *ends])]
    wanted = torch.stack(products) + c.double()
    d = c if into else unwritten(*c.shape, dtype=_FLOAT)
    args = KGroupedArgs(a, b.mT, of_a, of_b, c, _int32(ends), _FLOAT)
    if scaling == UNSCALED:
        dense.gemm_along_k(d, args, _dense_config(tile, True))
    else:
        fp8.gemm_along_k(d, args, _fp8_config(tile, scaling))
    return near(d, wanted)


def integer_weights(m: int, n: int, k: int, bits: int, activation: str, shape: tuple[int, int, int, int, int]) -> bool:
    """Weights of 8 or 4 bits, with a bias."""
    x, bias = drawn(m, k), drawn(n)
    q, scales = random_weight(n, k, bits, HALF, DEVICE, torch.Generator().manual_seed(1))
    d = unwritten(m, columns_out(n, activation))
    config = weight_only_model.deepest(bits, *shape)
    weight_only.launch((d,), WeightOnlyMatmulArgs(x, q, scales, bias, activation, HALF), config)
    exact = x.double() @ packing.restore(q, scales.double()).mT
    return near(d, apply_epilogue(exact, bias, None, activation, _DOUBLE))


def tensor_cast(m: int, n: int, dtype: torch.dtype) -> bool:
    """One scale for x: the bits of the reference."""
    x = drawn(m, n, dtype=dtype)
    q, scale = torch.empty(m, n, dtype=_FP8, device=DEVICE), torch.empty(1, 1, device=DEVICE)
    per_tensor_cast.launch((q, scale), PerTensorCastArgs(x), per_tensor_cast.CONFIGS[0])
    wanted, wanted_scale = cast_reference(x)
    return torch.equal(scale, wanted_scale) and torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


def cases() -> dict[str, Callable[[], bool]]:
    """Every case by its name."""
    found: dict[str, Callable[[], bool]] = {name: partial(_proved, proof) for name, proof in selftest.PROOFS.items()}
    runs: tuple[tuple[str, Callable[..., bool], Sequence[tuple[Any, ...]]], ...] = (
        ("dense", partial(product, dense_kernel), DENSE),
        ("few rows", partial(product, few_rows), FEW_ROWS),
        ("fp8", scaled_product, FP8),
        ("requantised", requantised, REQUANTISED),
        ("few rows scaled", scaled_few_rows, FEW_ROWS_SCALED),
        ("grouped", grouped, GROUPED),
        ("along k", along_k, ALONG_K),
        ("tensor cast", tensor_cast, TENSOR_CASTS),
        ("weight only", integer_weights, WEIGHT_ONLY),
        *ATTENTION_RUNS,
        *LOSS_RUNS,
        *MOE_RUNS,
        *SAMPLING_RUNS,
    )
    return found | {f"{name} {case}": partial(run, *case) for name, run, each in runs for case in each}


def run_cases(names: Sequence[str]) -> int:
    """Run the named cases, or all; prints and counts the wrong ones."""
    set_sm_budget(PROCESSORS)
    known = cases()
    wrong = [name for name in names or known if not known[name]()]
    torch.cuda.synchronize()
    print(f"{len(names or known)} cases, {len(wrong)} wrong", *wrong, sep="\n  ")
    return len(wrong)


def _proved(proof: Callable[[torch.device], str | None]) -> bool:
    return proof(DEVICE) is None


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def _scaled(scaling: int, *shapes: tuple[int, ...], turned: bool = False) -> list[tuple[Tensor, Any, Tensor]]:
    """(operand, scales, its values in float64) of a and of b.mT, each (..., rows, K); 16-bit ones have no scales."""
    if scaling == UNSCALED:
        plain = [drawn(*shape, turned=turned) for shape in shapes]
        return [(t, None, t.double()) for t in plain]
    return [_quantised(shape, layout) for shape, layout in zip(shapes, Scaling(scaling).layouts, strict=True)]


def _quantised(shape: tuple[int, ...], layout: ScaleLayout) -> tuple[Tensor, Tensor, Tensor]:
    *batch, rows, depth = shape
    scales = layout.empty(rows, depth, DEVICE, *batch)
    scales.copy_(torch.exp2(4 * torch.rand(scales.shape, device=DEVICE) - 2))
    q = drawn(*shape, dtype=_FP8)
    return q, scales, restore(q.double(), scales.double(), layout, _DOUBLE)


def _dense_config(tile: tuple[int, ...], along_n: bool = False) -> dense_kernel.Config:
    return dense.config_of(cost_model.Tile(*tile), cost_model.Problem(1, 1, 1, mn_major_b=along_n))


def _fp8_config(tile: tuple[int, ...], scaling: int) -> fp8_kernel.Config:
    return fp8.config_of(fp8_cost_model.Tile(*tile), fp8_cost_model.Problem(1, 1, 1, scaling=scaling))


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*cases(), sep="\n")
    else:
        sys.exit(min(1, run_cases(sys.argv[1:])))
