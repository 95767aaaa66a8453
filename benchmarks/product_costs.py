"""Times of products of 16-bit operands by every config of a kernel, beside cuBLAS: what cost models are fitted to.

    python benchmarks/product_costs.py --json FILE [--budget SECONDS]
    python benchmarks/product_costs.py --compile 0/4      # the first of four parts of all kernels, into the cache

For each layer shape (N, K) and each M, in one process and interleaved: `sm90.few_rows` with every config whose tokens
hold M, `sm90.dense` with the tiles of the least predicted time, and torch's matmul.  Each is a CUDA graph of calls that
rotate over copies of B, so weights come from memory.  A row: M, N, K, kernel, config, microseconds, spread.  Shapes are
in a fixed random order, so a run that ends early has measured a sample of them.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.graph import MIN_LAUNCHES, interleave_graphs
from tilewright.bench.rotation import rotate, sets_for
from tilewright.ops.gemm.dense.args import as_batch, matmul_args
from tilewright.ops.gemm.kernels.sm90 import cost_model, dense, dense_kernel, few_rows, few_rows_model

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


def main() -> None:
    """Compile, or measure and write after each product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", metavar="PART/PARTS")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no product is begun")
    options = parser.parse_args()
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        compile_part(part, parts)
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
    for m, n, k in products():
        if time.monotonic() - began > options.budget:
            break
        new = measure(m, n, k)
        rows += new
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
        fastest = min(new, key=lambda row: row[5])
        print(f"{time.monotonic() - began:6.1f} s  {m} x {n} x {k}:", *fastest[3:6], "us", flush=True)


def products() -> Iterator[tuple[int, int, int]]:
    """(M, N, K) of every product, in a fixed random order."""
    sizes = [(m, n, k) for n, k in LAYERS for m in (*FEW_ROWS, *ROWS) if m * n <= 64 << 20]
    random.Random(0).shuffle(sizes)
    return iter(sizes)


def configs(m: int, n: int, k: int) -> Iterator[tuple[str, Any]]:
    """(kernel, config) of the kernels of this library for a product."""
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


def call_of(kernel: str, config: Any, a: Tensor, b: Tensor) -> Callable[[], object]:
    """One product of a (M, K) and b (K, N)."""
    gemm = few_rows.gemm if kernel == "sm90.few_rows" else dense_kernel.gemm
    args = as_batch(matmul_args(a, b, None, None, None, 1.0, None))

    def call() -> Tensor:
        d = torch.empty(1, a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
        gemm(d, args, config)
        return d

    return call


def operands(m: int, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a (M, K) and b (K, N), contiguous along K, that together exceed the L2."""
    count = sets_for(2 * (m * k + n * k + m * n), "cuda")
    return [(randn(m, k), randn(n, k).mT) for _ in range(count)]


def randn(*shape: int) -> Tensor:
    """A bf16 tensor on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure(m: int, n: int, k: int) -> list[list[Any]]:
    """The rows of one product."""
    pairs = operands(m, n, k)
    kernels: dict[str, tuple[str, Sequence[int]]] = {"torch": ("torch", ())}
    calls = {"torch": rotate([partial(torch.matmul, a, b) for a, b in pairs])}
    for kernel, config in configs(m, n, k):
        name = f"{kernel} {tuple(config)}"
        kernels[name] = kernel, tuple(config)
        calls[name] = rotate([call_of(kernel, config, a, b) for a, b in pairs])
    launches = max(MIN_LAUNCHES, len(pairs))
    samples = interleave_graphs(calls, device="cuda", launches=launches, rounds=5)
    return [
        [m, n, k, *kernels[name], round(taken.median, 3), round(taken.interval().high - taken.interval().low, 3)]
        for name, taken in samples.items()
    ]


def compile_part(part: int, parts: int) -> None:
    """Launch each distinct kernel of this part once."""
    distinct: dict[tuple[Any, ...], tuple[str, Any, int, int]] = {}
    for m, n, k in products():
        for kernel, config in configs(m, n, k):
            distinct.setdefault((kernel, *config), (kernel, config, n, k))
    for index, (kernel, config, n, k) in enumerate(distinct.values()):
        if index % parts == part:
            call_of(kernel, config, randn(64, k), randn(n, k).mT)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
