"""The kernel of `kernels/sm90` compiled for the host, a fiber for each thread: torch's loss and gradient."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tilewright.ops.loss import entropy
from tilewright.ops.loss.entropy import Options
from tilewright.ops.loss.in_place import InPlaceBucket
from tilewright.ops.loss.kernels.sm90 import cross_entropy_in_place as kernel

THREADS, VECTORS = 64, 2
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Numbers(ctypes.Structure):
    """The numbers of a call, as in kernels_on_host.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("stride", "ignore_index")),
        *((name, ctypes.c_int) for name in ("rows", "n", "part", "blocks")),
        *((name, ctypes.c_float) for name in ("smoothing", "z_loss")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "tilewright").mkdir()
    for name in ("cluster", "copies"):
        (folder / "tilewright" / f"{name}.cuh").write_text("#pragma once\n#include <fibers.h>\n")
    includes = [f"-I{folder}", f"-I{HERE.parent / 'sampling'}", f"-I{kernel.KERNEL.file.parent}"]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    defines = [f"-DTHREADS={THREADS}", f"-DVECTORS={VECTORS}"]
    made = folder / "kernels.so"
    subprocess.run(["g++", *flags, *defines, *includes, HERE / "kernels_on_host.cpp", "-o", made], check=True)
    return ctypes.CDLL(str(made))


def poisoned(x, dtype):
    """x as rows with 16 elements of NaN between them."""
    m, n = x.shape
    return torch.full((m, n + 16), torch.nan, dtype=dtype)[:, :n].copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_no_cluster_suits_have_no_configuration(dtype):
    for n in (1, 1000, 4096, 32000, 128256, 262144, 1 << 20):
        bucket = InPlaceBucket(4096, n, 0, 1)
        config, fitting = kernel.configure(bucket, dtype), kernel.candidates(bucket, dtype)
        assert config in (fitting or (None,))
        size = n * dtype.itemsize
        assert (config is None) == (size < kernel.SHORTEST or size > kernel.MOST_BLOCKS * 128 * 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["mean", "rows"])
@pytest.mark.parametrize("n", [8, 1016, 1024, 4000])
def test_loss_and_gradient(library, n, form, dtype):
    x = poisoned(torch.randn(7, n) * 3, dtype)
    around = x.as_strided((7, n + 16), (n + 16, 1))
    if n > 8:
        x[3], x[4, 5], x[5, ::2] = 80.0, torch.nan, -torch.inf
    ignored = 3 if form == "rows" else -100
    index = torch.int32 if (form == "rows") == (dtype == torch.float32) else torch.int64
    target = torch.tensor([0, n - 1, ignored, n // 2, 1, 2, n - 2], dtype=index)
    options = Options(ignored, *((0.1, 0.01, 0.0, "none") if form == "rows" else (0.0, 0.0, 0.0, "mean")))
    exact = x.double().requires_grad_()
    wanted, lse, totals = entropy.forward(exact, target, None, options)
    dloss = torch.rand(7) if form == "rows" else torch.ones(())
    (gradient,) = torch.autograd.grad(wanted, exact, dloss.double())

    config = kernel.Config(THREADS, VECTORS, 1)
    blocks = kernel.blocks_of_row(n, dtype, config)
    part = -(-(n * dtype.itemsize // 16) // blocks)
    losses, made_lse = torch.full((7,), torch.nan), torch.full((7,), torch.nan)
    tensors = (losses, made_lse, x, target, totals.float(), dloss)
    pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    numbers = Numbers(x.stride(0), ignored, 7, n, part, blocks, *options[1:3])
    getattr(library, f"{form}_{str(dtype).removeprefix('torch.')}")(pointers, ctypes.byref(numbers))

    made = entropy.reduced(losses, made_lse, totals.float(), options) if form == "mean" else losses
    torch.testing.assert_close(made, wanted.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(made_lse, lse.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    close = {"rtol": 1e-2, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(x.float(), gradient.float(), **close, equal_nan=True)
    assert around[:, n:].isnan().all()
