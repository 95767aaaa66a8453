"""Times of products by many configs of a kernel, beside cuBLAS: what cost models are fitted to.

    python benchmarks/product_costs.py --json FILE [--budget SECONDS] [--middle]
    python benchmarks/product_costs.py --compile 0/4      # the first of four parts of all kernels, into the cache

For each layer shape (N, K) and each M, in one process and interleaved: `sm90.few_rows` with every config whose tokens
hold M, `sm90.dense` with the tiles of the least predicted time, and torch's matmul.  Each is a CUDA graph of calls that
rotate over copies of B, so weights come from memory.  A row: M, N, K, kernel, config, microseconds, spread.  Shapes are
in a fixed random order, so a run that ends early has measured a sample of them.

With --middle: M from 96 to 512, `sm90.dense` and `sm90.fp8` (block scales) with and without a split of K, beside
torch's products of bf16 and of e4m3 with one scale each ("torch", and with fast accumulation "torch fp8").
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.graph import MIN_LAUNCHES, interleave_graphs
from tilewright.bench.rotation import rotate, sets_for
from tilewright.dispatch.bucket import row_bucket
from tilewright.ops.gemm.dense.args import as_batch, matmul_args
from tilewright.ops.gemm.kernels.sm90 import (
    cost_model,
    dense,
    dense_kernel,
    few_rows,
    few_rows_model,
    fp8,
    fp8_cost_model,
    fp8_kernel,
)
from tilewright.ops.gemm.scaled.args import plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import Scaling

BF16 = torch.bfloat16
Operands = tuple[Tensor, ...]

LAYERS = (
    # (N, K) of layers of public models: Qwen2.5, Llama 3, Gemma 2, Phi 3, Mistral, DeepSeek, and odd ones
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (6144, 4096), (28672, 4096), (4096, 14336),
    (2048, 1536), (17920, 1536), (1536, 8960), (7168, 5120), (27648, 5120), (5120, 13824), (10240, 8192),
    (8192, 28672), (8192, 2304), (18432, 2304), (2304, 9216), (9216, 3072), (16384, 3072), (3072, 8192),
    (5120, 1920), (1024, 3584), (12288, 4608), (2112, 7168), (3200, 8640), (11008, 4096), (49152, 2048),
)  # fmt: skip
FEW_ROWS = (1, 16, 48)
ROWS = (64, 96, 192, 384, 768, 1536, 3072)
TILES = 4
"""Tiles of sm90.dense for each product, of the least predicted time."""
MIDDLE_LAYERS = (
    # Llama 3.1 8B, Qwen2.5 7B, DeepSeek V3
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),
    (2112, 7168), (576, 7168), (7168, 16384), (7168, 2048),
)  # fmt: skip
MIDDLE_ROWS = (96, 128, 192, 256, 384, 512)


class Product(NamedTuple):
    """(M, K) @ (K, N) of operands of `bits`; middle: by tiles with and without a split of K."""

    m: int
    n: int
    k: int
    bits: int = 16
    middle: bool = False


def main() -> None:
    """Compile, or measure and write after each product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", metavar="PART/PARTS")
    parser.add_argument("--middle", action="store_true", help="M from 96 to 512, K split or not, also e4m3")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no product is begun")
    options = parser.parse_args()
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        compile_part(part, parts, options.middle)
        return
    began = time.monotonic()
    rows: list[list[Any]] = []
    result: dict[str, Any] = {
        "kind": "product_costs",
        "machine": machine.describe("cuda").to_dict(),
        "commit": commit(),
        "columns": ["M", "N", "K", "kernel", "config", "us", "spread"],
        "rows": rows,
    }
    for product in products(options.middle):
        if time.monotonic() - began > options.budget:
            break
        new = measure(product)
        rows += new
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
        fastest = min(new, key=lambda row: row[5])
        vendor = next(row[5] for row in new if row[3].startswith("torch"))
        m, n, k = product[:3]
        print(f"{time.monotonic() - began:6.1f} s  {m} x {n} x {k}:", *fastest[3:6], "us; torch", vendor, flush=True)


def products(middle: bool) -> Iterator[Product]:
    """Every product, in a fixed random order."""
    if middle:
        found = [Product(m, n, k, bits, True) for n, k in MIDDLE_LAYERS for m in MIDDLE_ROWS for bits in (16, 8)]
    else:
        found = [Product(m, n, k) for n, k in LAYERS for m in (*FEW_ROWS, *ROWS) if m * n <= 64 << 20]
    random.Random(0).shuffle(found)
    return iter(found)


def configs(product: Product) -> Iterator[tuple[str, Any]]:
    """(kernel, config) of the kernels of this library for a product."""
    m, n, k, bits, middle = product
    if middle:
        yield from middle_configs(m, n, k, bits)
        return
    if m <= few_rows_model.MAX_ROWS:
        tokens = few_rows_model.fitting(few_rows_model.TOKENS, m)
        work = few_rows_model.Work(m, n, k)
        space = few_rows_model.space([tokens], few_rows_model.UNSCALED)
        yield from (("sm90.few_rows", config) for config in few_rows_model.ranked(space, work))
    if m in ROWS:
        problem = cost_model.Problem(m, n, k, sms=dense.sm_count())
        tiles = (cost_model.Tile(c.block_m, c.block_n, c.cluster_m, c.cluster_n) for c in dense.choices(problem))
        distinct = list(dict.fromkeys(tiles))[:TILES]
        yield from (("sm90.dense", dense.config_of(tile, problem)) for tile in distinct)


def middle_configs(m: int, n: int, k: int, bits: int) -> Iterator[tuple[str, Any]]:
    """The four tiles of the least predicted time, the best of each split and of each way to share an operand, some from
    further down, the choice for the bucket of M, and that of the model that knows no splits.
    """
    problem: Any
    choice: Any
    if bits == 16:
        kernel, choice, problem = "sm90.dense", dense, cost_model.Problem(m, n, k, sms=dense.sm_count())
    else:
        kernel, choice, problem = "sm90.fp8", fp8, fp8_cost_model.Problem(m, n, k, sms=dense.sm_count())
    ranked = choice.rank_middle(problem)
    best_of: dict[Any, Any] = {}
    for tile in ranked:
        for key in (tile.split, (tile.cluster_m, tile.cluster_n, tile.split > 1)):
            best_of.setdefault(key, tile)
    tiles = dict.fromkeys((*ranked[:4], *best_of.values(), *ranked[8:40:12]))
    bucket = problem._replace(m=row_bucket(m))
    chosen = choice.choose_middle(bucket), choice.choose(bucket)
    found = (*(choice.config_of(tile, problem) for tile in tiles), *chosen)
    yield from ((kernel, config) for config in dict.fromkeys(found))


def call_of(kernel: str, config: Any, operands: Operands) -> Callable[[], object]:
    """One product of a (M, K) and b (K, N)."""
    a, b = operands[:2]
    if kernel.startswith("torch"):
        if a.dtype == BF16:
            return partial(torch.matmul, a, b)
        one = torch.ones((), device=a.device)
        return partial(torch._scaled_mm, a, b, one, one, out_dtype=BF16, use_fast_accum=True)
    gemm: Any
    args: Any
    if kernel == "sm90.fp8":
        of_a, of_b = operands[2:]
        gemm, args = fp8_kernel.gemm, plain_scaled_args(a[None], b[None], of_a, of_b, BF16)
    else:
        gemm = few_rows.gemm if kernel == "sm90.few_rows" else dense_kernel.gemm
        args = as_batch(matmul_args(a, b, None, None, None, 1.0, None))

    def call() -> Tensor:
        d = torch.empty(1, a.shape[0], b.shape[1], device=a.device, dtype=BF16)
        gemm(d, args, config)
        return d

    return call


def operand_sets(product: Product) -> list[Operands]:
    """Sets of a (M, K) and b (K, N), contiguous along K, and scales of e4m3, that together exceed the L2."""
    m, n, k, bits, _ = product
    count = sets_for(bits // 8 * (m * k + n * k) + 2 * m * n, "cuda")
    return [operands_of(m, n, k, bits) for _ in range(count)]


def operands_of(m: int, n: int, k: int, bits: int) -> Operands:
    """One set."""
    a, b = randn(m, k), randn(n, k)
    if bits == 16:
        return a, b.mT
    of_a, of_b = Scaling.TOKEN_BLOCK.layouts
    scales = of_a.empty(m, k, "cuda", 1).fill_(1.0), of_b.empty(n, k, "cuda", 1).fill_(1.0)
    return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).mT, *scales


def randn(*shape: int) -> Tensor:
    """A bf16 tensor on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=BF16)


def measure(product: Product) -> list[list[Any]]:
    """The rows of one product."""
    sets = operand_sets(product)
    kernels: dict[str, tuple[str, Any]] = {"torch": ("torch" if product.bits == 16 else "torch fp8", ())}
    kernels |= {f"{kernel} {tuple(config)}": (kernel, config) for kernel, config in configs(product)}
    calls = {
        name: rotate([call_of(kernel, config, operands) for operands in sets])
        for name, (kernel, config) in kernels.items()
    }
    launches = max(MIN_LAUNCHES, len(sets))
    samples = interleave_graphs(calls, device="cuda", launches=launches, rounds=5)
    return [
        [
            *(*product[:3], kernels[name][0], tuple(kernels[name][1]), round(taken.median, 3)),
            round(taken.interval().high - taken.interval().low, 3),
        ]
        for name, taken in samples.items()
    ]


def compile_part(part: int, parts: int, middle: bool) -> None:
    """Launch each distinct kernel of this part once."""
    distinct: dict[tuple[Any, ...], tuple[str, Any, Product]] = {}
    for product in products(middle):
        for kernel, config in configs(product):
            trims = kernel != "sm90.few_rows" and product.m % config.block_m != 0
            distinct.setdefault((kernel, trims, *config), (kernel, config, product))
    for index, (kernel, config, product) in enumerate(distinct.values()):
        if index % parts == part:
            call_of(kernel, config, operands_of(*product[:4]))()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
