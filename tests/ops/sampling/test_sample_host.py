"""`kernels/sm90/sample.cuh` compiled for the host, a fiber for each thread of a cluster: the reference's tokens, on every
road: lists, searches of both thresholds, draws; rows that begin anywhere.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tilewright import ops
from tilewright.ops.sampling import checks
from tilewright.ops.sampling.kernels.sm90 import resident, sample, top_k
from tilewright.ops.sampling.sample import raw_arguments
from tilewright.ops.sampling.sample_reference import draw_tokens

THREADS = 64
MAIN = """
#include <greedy.cuh>
#include <sample.cuh>
#include <top_k.cuh>
#include <top_k_short.cuh>
using namespace tilewright;
template <typename T> struct Config { static constexpr int kThreads = THREADS, kRowOffset = ROW_OFFSET; using Element = T; };
template <typename T>
static void run(void** p, float temperature, int top_k, float top_p, float min_p, i64 stride, int m, int n, int part, int mode,
                int blocks) {
    for (int row = 0; row < m; ++row) {
        run_cluster(row, blocks, THREADS, [&] {
            sample<Config<T>>((i64*)p[0], (float*)p[1], (T*)p[2], (i64*)p[3], (i64*)p[4], (float*)p[5], (int*)p[6],
                              (float*)p[7], (float*)p[8], temperature, top_k, top_p, min_p, stride, n, part, mode);
        });
    }
}
template <typename T> static void best(void** p, i64 stride, int m, int n, int part, int blocks) {
    for (int row = 0; row < m; ++row) {
        run_cluster(row, blocks, THREADS, [&] { greedy<Config<T>>((i64*)p[0], (T*)p[1], stride, n, part); });
    }
}
template <typename T> struct TopKConfig { static constexpr int kThreads = THREADS, kRowOffset = TOP_K_OFFSET, kBest = 512; using Element = T; };
template <typename T> struct ShortConfig { static constexpr int kWarps = 2, kEach = 16; using Element = T; };
template <typename T> static void largest(void** p, i64 stride, int m, int n, int k, int part, int blocks) {
    if (part == 0) {
        for (int pair = 0; 2 * pair < m; ++pair) {
            run_cluster(pair, 1, 64, [&] { top_k_short<ShortConfig<T>>((T*)p[0], (i64*)p[1], (T*)p[2], stride, m, n, k); });
        }
        return;
    }
    for (int row = 0; row < m; ++row) {
        run_cluster(row, blocks, THREADS, [&] { top_k<TopKConfig<T>>((T*)p[0], (i64*)p[1], (T*)p[2], stride, n, k, part); });
    }
}
extern "C" void top_k_float32(void** p, i64 stride, int m, int n, int k, int part, int blocks) { largest<float>(p, stride, m, n, k, part, blocks); }
extern "C" void top_k_bfloat16(void** p, i64 stride, int m, int n, int k, int part, int blocks) { largest<bfloat16>(p, stride, m, n, k, part, blocks); }
extern "C" void greedy_float32(void** p, i64 stride, int m, int n, int part, int blocks) { best<float>(p, stride, m, n, part, blocks); }
extern "C" void greedy_bfloat16(void** p, i64 stride, int m, int n, int part, int blocks) { best<bfloat16>(p, stride, m, n, part, blocks); }
extern "C" void sample_float32(void** p, float t, int k, float q, float s, i64 stride, int m, int n, int part, int mode, int blocks) {
    run<float>(p, t, k, q, s, stride, m, n, part, mode, blocks);
}
extern "C" void sample_bfloat16(void** p, float t, int k, float q, float s, i64 stride, int m, int n, int part, int mode, int blocks) {
    run<bfloat16>(p, t, k, q, s, stride, m, n, part, mode, blocks);
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "tilewright").mkdir()
    for name in ("types", "ptx", "mbarrier", "cluster", "copies"):
        (folder / "tilewright" / f"{name}.cuh").write_text("#pragma once\n#include <fibers.h>\n")
    (folder / "main.cpp").write_text(MAIN)
    includes = [f"-I{folder}", f"-I{Path(__file__).parent}", f"-I{sample.KERNEL.file.parent}"]
    offsets = resident.row_offset(THREADS), top_k.row_offset(THREADS, 512)
    defines = [f"-DTHREADS={THREADS}", f"-DROW_OFFSET={offsets[0]}", f"-DTOP_K_OFFSET={offsets[1]}"]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, *defines, *includes, folder / "main.cpp", "-o", folder / "sample.so"], check=True)
    return ctypes.CDLL(str(folder / "sample.so"))


def drawn(library, x, seeds, positions, blocks, mode, **parameters):
    """(tokens, logprobs) of the kernel."""
    args = raw_arguments(
        x, seeds, positions, *(parameters.get(p) for p in ("temperature", "top_k", "top_p", "min_p")), mode
    )
    m, n = x.shape
    tokens, logprobs = torch.full((m,), -7), torch.full((m,), torch.nan)
    given = (tokens, logprobs, x, seeds, positions, args.temperatures, args.top_ks, args.top_ps, args.min_ps)
    pointers = (ctypes.c_void_p * len(given))(*(None if t is None else t.data_ptr() for t in given))
    call = getattr(library, f"sample_{str(x.dtype).removeprefix('torch.')}")
    numbers = args.temperature, args.top_p, args.min_p
    t, p, s = (ctypes.c_float(number) for number in numbers)
    part = resident.part_vectors(n, x.dtype, blocks)
    call(pointers, t, args.top_k, p, s, ctypes.c_int64(x.stride(0)), m, n, part, mode, blocks)
    wanted = draw_tokens(args)
    return tokens, logprobs, *wanted


def pick(values, dtype, m):
    return torch.tensor([values[i % len(values)] for i in range(m)], dtype=dtype)


ROWS = {  # elements of a row, blocks, the logits
    "random": (3001, 4, lambda m, n: torch.randn(m, n) * 3),
    "ties": (2500, 2, lambda m, n: (torch.randn(m, n) * 2).round()),
    "all equal": (1300, 2, lambda m, n: torch.full((m, n), -2.5)),
    "flat": (1601, 2, lambda m, n: torch.randn(m, n) * 0.3),
    "far apart": (1100, 3, lambda m, n: torch.randn(m, n).exp() * torch.randn(m, n) * 1e30),
    "short": (333, 1, lambda m, n: torch.randn(m, n) * 3),
    "two": (2, 1, lambda m, n: torch.randn(m, n)),
    "one": (1, 1, lambda m, n: torch.randn(m, n)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ROWS)
def test_the_tokens_of_the_reference(library, case, dtype):
    n, blocks, make = ROWS[case]
    m = 30
    storage = torch.full((m, n + 3), torch.inf, dtype=dtype)
    x = storage[:, 1 : n + 1]  # unaligned, between numbers that would be drawn
    x.copy_(make(m, n))
    if case == "random":
        checks.spoil(x[10:16])
    positions = torch.arange(m)
    seeds = torch.full_like(positions, 11)
    parameters = {
        "temperature": pick((1.0, 0.5, 2.0, 0.0, 1.0, 0.8, 1e-3), torch.float32, m),
        "top_k": pick((0, 5, 1, 200, 0, 9, 700, 0), torch.int32, m),
        "top_p": pick((0.9, 1.0, 0.3, 1e-8, 0.99, 1.0), torch.float32, m),
        "min_p": pick((0.0, 0.0, 0.05, 0.0, 1.0), torch.float32, m),
    }
    for mode in (1, 2):
        tokens, logprobs, wanted, wanted_logs = drawn(library, x, seeds, positions, blocks, mode, **parameters)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(logprobs, wanted_logs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 333, 2501, 5003])
def test_the_likeliest_token(library, n, dtype):
    m = 12
    for offset in range(4):
        storage = torch.full((m, n + 7), torch.inf, dtype=dtype)
        x = storage[:, offset : n + offset]
        x.copy_((torch.randn(m, n) * 3).round())
        checks.spoil(x[:6])
        x[6], x[7] = -torch.inf, torch.nan
        x[8, -1:], x[9, :1] = torch.inf, torch.inf
        tokens = torch.full((m,), -7)
        for blocks in (1, 3):
            pointers = (ctypes.c_void_p * 2)(tokens.data_ptr(), x.data_ptr())
            call = getattr(library, f"greedy_{str(dtype).removeprefix('torch.')}")
            call(pointers, ctypes.c_int64(x.stride(0)), m, n, resident.part_vectors(n, dtype, blocks), blocks)
            assert torch.equal(tokens, ops.greedy(x, backend="torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "k", "blocks"),
    [(2, 2, 1), (300, 7, 0), (512, 32, 0), (700, 500, 2), (2501, 1, 3), (2501, 40, 2), (2600, 333, 3)],
)
def test_the_largest_elements(library, n, k, blocks, dtype):
    m = 9
    storage = torch.full((m, n + 7), torch.nan, dtype=dtype)
    x = storage[:, 1 : n + 1]
    x.copy_(torch.randn(m, n) * 3)
    x[:3] = x[:3].round()
    checks.spoil(x[3:8])
    x[8] = -torch.inf
    values, indices = torch.zeros((m, k), dtype=dtype), torch.full((m, k), -7)
    pointers = (ctypes.c_void_p * 3)(values.data_ptr(), indices.data_ptr(), x.data_ptr())
    part = resident.part_vectors(n, dtype, blocks) if blocks else 0
    call = getattr(library, f"top_k_{str(dtype).removeprefix('torch.')}")
    call(pointers, ctypes.c_int64(x.stride(0)), m, n, k, part, blocks)
    _, wanted = ops.top_k(x, k, backend="torch")
    assert torch.equal(indices, wanted)
    bits = torch.int32 if dtype == torch.float32 else torch.int16  # torch's gather may change those of NaN
    assert torch.equal(values.view(bits), x.view(bits).gather(1, wanted))
