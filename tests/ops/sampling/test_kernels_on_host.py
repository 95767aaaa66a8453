"""The kernels of `kernels/sm90` compiled for the host, a fiber for each thread of a cluster: the reference's results on
every road: lists, searches of both thresholds, draws; rows that begin anywhere, between numbers that would be chosen.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.ops.sampling import checks
from tilewright.ops.sampling.kernels.sm90 import resident, sample, top_k
from tilewright.ops.sampling.sample import raw_arguments
from tilewright.ops.sampling.sample_reference import draw_tokens

THREADS = 64
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Numbers(ctypes.Structure):
    """The numbers of a call, as in kernels_on_host.cpp."""

    _fields_ = [
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows", "n", "part", "blocks", "mode", "k")),
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "tilewright").mkdir()
    for name in ("types", "ptx", "mbarrier", "cluster", "copies"):
        (folder / "tilewright" / f"{name}.cuh").write_text("#pragma once\n#include <fibers.h>\n")
    offsets = resident.row_offset(THREADS), top_k.row_offset(THREADS, 512)
    defines = [f"-DTHREADS={THREADS}", f"-DROW_OFFSET={offsets[0]}", f"-DTOP_K_OFFSET={offsets[1]}"]
    includes = [f"-I{folder}", f"-I{HERE}", f"-I{sample.KERNEL.file.parent}"]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    made = folder / "kernels.so"
    subprocess.run(["g++", *flags, *defines, *includes, HERE / "kernels_on_host.cpp", "-o", made], check=True)
    return ctypes.CDLL(str(made))


def run(library, kernel, tensors, x, blocks, **numbers):
    """Call a kernel on these tensors, None for a null pointer."""
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    m, n = x.shape
    given = Numbers(stride=x.stride(0), rows=m, n=n, blocks=blocks, **numbers)
    given.part = resident.part_vectors(n, x.dtype, blocks)
    getattr(library, f"{kernel}_{str(x.dtype).removeprefix('torch.')}")(pointers, ctypes.byref(given))


def between_infinities(x: Tensor, dtype: torch.dtype, offset: int = 1) -> Tensor:
    """x as rows that begin `offset` elements behind 16 bytes, with +inf on both sides."""
    m, n = x.shape
    view = torch.full((m, n + 7), torch.inf, dtype=dtype)[:, offset : n + offset]
    return view.copy_(x)


def pick(values, dtype, m):
    return torch.tensor([values[i % len(values)] for i in range(m)], dtype=dtype)


ROWS = {  # tokens, blocks, the logits
    "random": (3001, 4, lambda m, n: torch.randn(m, n) * 3),
    "ties": (1500, 2, lambda m, n: (torch.randn(m, n) * 2).round()),
    "all equal": (700, 2, lambda m, n: torch.full((m, n), -2.5)),
    "flat": (1601, 2, lambda m, n: torch.randn(m, n) * 0.3),
    "far apart": (1100, 3, lambda m, n: torch.randn(m, n).exp() * torch.randn(m, n) * 1e30),
    "some blocks list what is near": (5001, 3, lambda m, n: torch.randn(m, n).sort(-1).values * 0.1),
    "short": (333, 1, lambda m, n: torch.randn(m, n) * 3),
    "two": (2, 1, torch.randn),
    "one": (1, 1, torch.randn),
}


@both_dtypes
@pytest.mark.parametrize("case", ROWS)
def test_the_tokens_of_the_reference(library, case, dtype):
    n, blocks, make = ROWS[case]
    m = 18
    x = between_infinities(make(m, n), dtype)
    if case == "random":
        checks.spoil(x[10:15])
    positions = torch.arange(m)
    seeds = torch.full_like(positions, 11)
    args = raw_arguments(
        *(x, seeds, positions),
        pick((1.0, 0.5, 2.0, 0.0, 1.0, 0.8, 1e-3), torch.float32, m),
        pick((0, 5, 1, 200, 0, 9, 700, 0), torch.int32, m),
        pick((0.9, 1.0, 0.3, 1e-8, 0.99, 1.0), torch.float32, m),
        pick((0.0, 0.0, 0.05, 0.0, 1.0), torch.float32, m),
        1 if dtype == torch.float32 else 2,
    )
    tokens, logprobs = torch.full((m,), -7), torch.full((m,), torch.nan)
    parameters = (args.temperatures, args.top_ks, args.top_ps, args.min_ps)
    run(library, "sample", (tokens, logprobs, x, seeds, positions, *parameters), x, blocks, mode=args.logprobs)
    wanted, wanted_logs = draw_tokens(args)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs, wanted_logs, rtol=1e-6, atol=1e-6)


@both_dtypes
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 333, 2501])
def test_the_likeliest_token(library, n, blocks, dtype):
    m = 10
    for offset in range(4):
        x = between_infinities((torch.randn(m, n) * 3).round(), dtype, offset)
        checks.spoil(x[:5])
        x[6], x[7] = -torch.inf, torch.nan
        x[8, -1:], x[9, :1] = torch.inf, torch.inf
        tokens = torch.full((m,), -7)
        run(library, "greedy", (tokens, x), x, blocks)
        assert torch.equal(tokens, ops.greedy(x, backend="torch"))


LARGEST = {  # kernel, elements, k, blocks
    "a warp": ("top_k_short", 300, 7, 1),
    "a warp, full": ("top_k_short", 512, 32, 1),
    "both": ("top_k", 2, 2, 1),
    "a search": ("top_k", 700, 500, 2),
    "a list of one": ("top_k", 2501, 1, 3),
    "a list": ("top_k", 2501, 40, 2),
    "a search from a bound": ("top_k", 1600, 90, 3),
}


@both_dtypes
@pytest.mark.parametrize("case", LARGEST)
def test_the_largest_elements(library, case, dtype):
    kernel, n, k, blocks = LARGEST[case]
    m = 9
    x = between_infinities(torch.randn(m, n) * 3, dtype)
    x[:3] = x[:3].round()
    checks.spoil(x[3:8])
    x[8] = -torch.inf
    values, indices = torch.zeros((m, k), dtype=dtype), torch.full((m, k), -7)
    run(library, kernel, (values, indices, x), x, blocks, k=k)
    _, wanted = ops.top_k(x, k, backend="torch")
    assert torch.equal(indices, wanted)
    bits = torch.int32 if dtype == torch.float32 else torch.int16  # torch's gather may change those of NaN
    assert torch.equal(values.view(bits), x.view(bits).gather(1, wanted))
