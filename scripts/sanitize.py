"""The CUDA C++ kernels under compute-sanitizer: `python scripts/sanitize.py [memcheck racecheck synccheck]`.

Each tool runs this file again with `--cases`, one case at a time.  A case launches a proof kernel or a GEMM engine in a
small size; together they reach every part: rings that turn, clusters, splits of K, all layouts, epilogues, ragged
edges; results are compared too.  Needs a Hopper GPU and the CUDA toolkit's compute-sanitizer.  Exits with 1 if a tool
reports anything.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.jit import selftest
from tilewright.ops.gemm.engines import dense_cuda, few_rows_cuda
from tilewright.ops.gemm.operands import apply_epilogue, columns_out

LIMIT = 200  # seconds for one case; racecheck follows every access to shared memory
TOOLS = ("memcheck", "racecheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_HALF, _FLOAT = torch.bfloat16, torch.float32

# rows, columns, depth, layout, activation, result, config
DENSE = (
    (300, 520, 584, "nt", "", _HALF, dense_cuda.Config(128, 256, 4, 1, 1, 4)),
    (300, 520, 584, "nn", "", _HALF, dense_cuda.Config(128, 144, 4, 2, 1, 4)),
    (296, 520, 584, "tn", "gelu", _FLOAT, dense_cuda.Config(128, 128, 4, 1, 2, 4)),
    (296, 520, 584, "tt", "silu", _HALF, dense_cuda.Config(64, 96, 8, 2, 1, 4)),
    (200, 512, 520, "nt", "swiglu", _HALF, dense_cuda.Config(128, 256, 4, 1, 1, 4)),
)
FEW_ROWS = (
    (1, 520, 2056, "nt", "", _HALF, few_rows_cuda.Config(8, 3, 1, 3)),
    (16, 520, 2056, "nt", "relu", _FLOAT, few_rows_cuda.Config(16, 4, 4, 2)),
    (33, 520, 2056, "nn", "silu", _HALF, few_rows_cuda.Config(64, 5, 8, 1)),
    (64, 9032, 264, "nt", "swiglu", _HALF, few_rows_cuda.Config(64, 5, 2, 1)),
)


def product(engine: Any, m: int, n: int, k: int, layout: str, activation: str, dtype: torch.dtype, config: Any) -> bool:
    """One launch with a bias, an addend and a scale; is the result right?"""

    def draw(rows: int, columns: int, turned: bool) -> Tensor:
        made = torch.randn((columns, rows) if turned else (rows, columns), device="cuda").to(_HALF)
        return made.mT if turned else made

    a, b = draw(m, k, layout[0] == "t"), draw(k, n, layout[1] == "t")
    bias, scale = torch.randn(n, device="cuda"), torch.tensor([0.5], device="cuda")
    c = torch.randn(m, columns_out(n, activation), device="cuda").to(dtype)
    d = torch.full_like(c, float("nan"))
    engine.gemm(d[None], a[None], b[None], bias, c[None], scale, 0.1, activation, config)
    exact = apply_epilogue(0.05 * (a.double() @ b.double()), bias, c, activation, torch.float64)
    return bool((d.double() - exact).norm() < 5e-3 * exact.norm())


def cases() -> dict[str, Callable[[], bool]]:
    """Every case by its name."""
    found: dict[str, Callable[[], bool]] = {name: partial(_proved, proof) for name, proof in selftest.PROOFS.items()}
    found |= {f"dense {case}": partial(product, dense_cuda, *case) for case in DENSE}
    found |= {f"few rows {case}": partial(product, few_rows_cuda, *case) for case in FEW_ROWS}
    return found


def run_cases(names: Sequence[str]) -> int:
    """Run the named cases, or all; prints and counts the wrong ones."""
    known = cases()
    wrong = [name for name in names or known if not known[name]()]
    torch.cuda.synchronize()
    print(f"{len(names or known)} cases, {len(wrong)} wrong", *wrong, sep="\n  ")
    return len(wrong)


def _proved(proof: Callable[[torch.device], str | None]) -> bool:
    return proof(torch.device("cuda", 0)) is None


def main(tools: list[str]) -> int:
    """Run `tools`, each case in a process of its own, several at a time; the number of runs that found something."""
    bad = 0
    for tool in tools:
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            said = list(pool.map(partial(_sanitized, tool), cases()))
        for name, (clean, words) in zip(cases(), said, strict=True):
            bad += not clean
            print(f"{tool}: {words}: {name}", flush=True)
        print(f"{tool}: {sum(clean for clean, _ in said)} of {len(said)} cases clean", flush=True)
    return bad


def _sanitized(tool: str, name: str) -> tuple[bool, str]:
    """One case under one tool: is it clean, and what was said."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Kernels alone: torch's own are not ours to judge, and racecheck takes minutes over them
    only = ["--kernel-regex", "kns=tilewright"] if tool == "racecheck" else []
    options = ["--tool", tool, "--report-api-errors", "no", *only, "--error-exitcode", "9"]
    command = [sanitizer, *options, sys.executable, __file__, "--cases", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return False, f"did not end in {LIMIT} s"
    said = "; ".join(_SUMMARY.findall(done.stdout))
    if done.returncode == 0 and said:
        return True, said
    return False, f"exit {done.returncode}, {said or (done.stdout + done.stderr)[-2000:]}"


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(min(1, run_cases(given[1:]) if given[:1] == ["--cases"] else main(given or list(TOOLS))))
