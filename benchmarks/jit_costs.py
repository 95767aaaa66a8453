"""What the JIT costs: compile, load, look up, launch; beside Triton's and aten's launch.

    python benchmarks/jit_costs.py [--json FILE] [--rounds 3]

Compile rows are the proof kernel with TMA and WGMMA (jit/selftest/wgmma_tile.cuh), each measured in processes of its
own, median over rounds; "first" is the first kernel of a process and includes loading the compiler.  They need no GPU.
Load and launch rows need one and are left out without.  Launch rows are host time to enqueue one call of a kernel that
does nothing, median over rounds of short batches, so the queue never fills.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tilewright import settings
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.jit import cache, driver, selftest, tape
from tilewright.jit.compilers import get_compiler
from tilewright.jit.compilers.kernel_args import I32, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.selftest import Tile
from tilewright.jit.tensor_map import tensor_map

BATCH, ROUNDS = 200, 40
FIRST, SECOND = (
    Tile(128, 4, torch.bfloat16, torch.bfloat16),
    Tile(128, 3, torch.bfloat16, torch.bfloat16),
)
NOTHING = """
#pragma once
namespace tilewright {
template <typename Config> __global__ void nothing(int* p, int n) { if (n < 0) *p = Config::kValue; }
}
"""

# Run in a fresh process: milliseconds of two compilations in a row, and of looking the first up again in memory.
PROBE = """
import json, sys, time
import torch
from benchmarks.jit_costs import FIRST, SECOND
from tilewright.jit.selftest import wgmma_tile
wgmma_tile._flags += tuple(sys.argv[1:])
times = []
for params in (FIRST, SECOND, FIRST):
    start = time.perf_counter()
    wgmma_tile.compile(params, "sm_90a")
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps(times))
"""


class Value(NamedTuple):
    """Parameters of the kernel that does nothing."""

    kValue: int


class NothingArgs(NamedTuple):
    """Arguments of the kernel that does nothing."""

    p: Pointer
    n: I32


def compile_rows(rounds: int) -> dict[str, float]:
    """Milliseconds a kernel, by road."""
    rows: dict[str, float] = {}
    for name in ("nvrtc", "nvcc"):
        if get_compiler(name).version() is None:
            continue
        cold, warm = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(_probe(name, folder))
                warm.append(_probe(name, folder))
        rows[f"{name}, first kernel of a process"], rows[f"{name}, next kernel"], _ = _medians(cold)
        if name == "nvrtc":
            first, following, memory = _medians(warm)
            rows |= {"from disk, first of a process": first, "from disk, next": following, "key and memory hit": memory}
            rows |= _precompiled(rounds)
    return rows


def _precompiled(rounds: int) -> dict[str, float]:
    """NVRTC's automatic precompiled headers: the process that makes one, and a later process that finds it."""
    made, found = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as headers, tempfile.TemporaryDirectory() as other:
            flags = "--pch", f"--pch-dir={headers}"
            made.append(_probe("nvrtc", tempfile.mkdtemp(dir=other), *flags))
            found.append(_probe("nvrtc", tempfile.mkdtemp(dir=other), *flags))
    first, following, _ = _medians(made)
    return {
        "nvrtc making a precompiled header, first kernel": first,
        "nvrtc with a precompiled header, next kernel": following,
        "nvrtc with another process's precompiled header, first": _medians(found)[0],
    }


def _probe(compiler: str, folder: str, *flags: str) -> list[float]:
    env = os.environ | {"TILEWRIGHT_CACHE_DIR": folder, "TILEWRIGHT_JIT_COMPILER": compiler}
    command = [sys.executable, "-c", PROBE, *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def _medians(samples: list[list[float]]) -> list[float]:
    return [round(statistics.median(column), 3) for column in zip(*samples, strict=True)]


def load_rows() -> dict[str, float]:
    """Milliseconds from a cubin in memory to a kernel on the device, and from the disk cache to a launch."""
    torch.zeros(1, device="cuda")
    driver.load(_nothing().compile(Value(-1)).binary, 0, _nothing().compile(Value(-1)).info["symbol"])
    load, whole = [], []
    for i in range(10):
        kernel, params = _nothing(), Value(i)
        artifact = kernel.compile(params)
        load.append(_timed(lambda a=artifact: driver.load(a.binary, 0, a.info["symbol"])))
        cache.forget()
        p = torch.zeros(1, dtype=torch.int32, device="cuda")
        whole.append(_timed(lambda k=kernel, p=p, v=params: k((1,), (p, 1), v, block=32)))
    return {
        "cubin to kernel on the device": round(statistics.median(load), 3),
        "disk cache to first launch": round(statistics.median(whole), 3),
    }


def launch_rows() -> dict[str, float]:
    """Microseconds of the host to enqueue one call."""
    device, kernel, params = torch.device("cuda", torch.cuda.current_device()), _nothing(), Value(1)
    p, x = torch.zeros(16, dtype=torch.int32, device=device), torch.zeros(64, 64, device=device)
    copying = selftest.Copy(32, 32, 2, torch.float32)
    maps = tensor_map(x, (32, 32)), tensor_map(x, (32, 32))
    kernel((1,), (p, 1), params, block=32)
    with tape.listen() as listening:
        kernel((1,), (p, 1), params, block=32)
    recorded, addresses = listening.finish([p]), [p.data_ptr()]
    (launch,) = kernel._plans.values()
    stream, address = torch.cuda.current_stream().cuda_stream, p.data_ptr()
    calls: dict[str, Callable[[], object]] = {
        "CudaKernel, plan lookup to launch": lambda: kernel((1,), (p, 1), params, block=32),
        "its bare Launch": lambda: launch(1, 1, 1, stream, None, address, 1),
        "its replay from a tape": lambda: recorded.replay(device.index, addresses),
        "tensor map, found": lambda: tensor_map(x, (32, 32)),
        "aten add_": lambda: p.add_(1),
    }
    if torch.cuda.get_device_capability() == (9, 0):
        calls["CudaKernel with two tensor maps"] = lambda: selftest.tma_copy(
            (1,), (*maps, 64, 64), copying, block=32, shared_bytes=8192
        )
    rows = _host_us(calls | _triton_calls(p))
    fresh = torch.empty(BATCH * 64 * 64, device=device)
    views = [fresh[i * 4096 : (i + 1) * 4096].view(64, 64) for i in range(BATCH)]
    start = time.perf_counter()
    for view in views:
        tensor_map(view, (32, 32))
    return rows | {"tensor map, made": round((time.perf_counter() - start) / BATCH * 1e6, 2)}


def _triton_calls(p: torch.Tensor) -> dict[str, Callable[[], object]]:
    from benchmarks.jit_costs_triton import nothing

    from tilewright.jit.triton_launch import TritonKernel

    ours = TritonKernel(nothing)
    return {
        "Triton's own kernel[grid]()": lambda: nothing[(1,)](p, 5, 1, num_warps=1),
        "TritonKernel": lambda: ours((1,), (p, 5), (1,), num_warps=1),
    }


def _nothing() -> CudaKernel:
    header = Path(settings.current().cache_dir, "nothing.cuh")
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(NOTHING)
    return CudaKernel(header, "nothing", NothingArgs, archs=("sm_80", "sm_90", "sm_100", "sm_120"))


def _host_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            samples[name].append((time.perf_counter() - start) / BATCH * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in samples.items()}


def _timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nothing of the user's is timed or touched
        settings.reload()
        found = {
            "kind": "jit_costs",
            "machine": machine.describe("cuda" if gpu else "cpu").to_dict(),
            "commit": commit(),
            "compilers": {name: get_compiler(name).version() for name in ("nvrtc", "nvcc")},
            "compile_ms": compile_rows(options.rounds),
            "load_ms": load_rows() if gpu else {},
            "launch_us": launch_rows() if gpu else {},
        }
    for section, unit in (("compile_ms", "ms"), ("load_ms", "ms"), ("launch_us", "us")):
        for name, value in found[section].items():
            print(f"{name:58}{value:10.3f} {unit}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the measured processes import this file
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)])
    main()
