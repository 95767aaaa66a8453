"""C++ kernels for the CPU: how they are compiled, cached, loaded and called; and that their arithmetic is exact."""

import ctypes
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tilewright.errors import BackendError, InputError
from tilewright.jit import cache
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, get_compiler
from tilewright.jit.compilers.host import architecture
from tilewright.jit.compilers.kernel_args import I64, Pointer
from tilewright.jit.host_launch import HostKernel

pytestmark = pytest.mark.skipif(get_compiler("host").version() is None, reason=get_compiler("host").install())

LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")
HERE = LEVELS[: LEVELS.index(architecture()) + 1] if architecture() in LEVELS else (architecture(),)

CONVERT = """
#include <tilewright/host/exponential.h>
#include <tilewright/host/rows.h>
namespace tilewright {
// y = x in another type; with kExp, e^x
template <class Config, class X = typename Config::X, class Y = typename Config::Y>
void convert(Y* y, const X* x, int64_t n, int threads) {
    using Row = RowOf<X, Y>;
    sweep(n, [=](int64_t i, auto extent) {
        const F32 v = Row::load(x + i, extent);
        Row::store(y + i, Config::kExp ? map(exp<sizeof(Y) == 4>, v) : v, extent);
    });
}
}
"""


class Params(NamedTuple):
    X: torch.dtype
    Y: torch.dtype
    kExp: bool = False


class Args(NamedTuple):
    y: Pointer
    x: Pointer
    n: I64


class Short(NamedTuple):
    y: Pointer
    x: Pointer


@pytest.fixture
def kernel(kernels: Path, tmp_path: Path) -> HostKernel:
    file = tmp_path / "convert.cpp"
    file.write_text(CONVERT)
    return HostKernel(file, "convert", Args)


def convert(kernel: HostKernel, x: torch.Tensor, dtype: torch.dtype, arch: str, exp: bool = False) -> torch.Tensor:
    function = kernel._load(kernel.compile(Params(x.dtype, dtype, exp), arch))
    y = torch.empty_like(x, dtype=dtype)
    function(y.data_ptr(), x.data_ptr(), x.numel(), 1)
    return y


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, but for the payload of NaN."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = (a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())
    return bool(equal.all())


@pytest.mark.parametrize("arch", HERE)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_types_are_widened_and_rounded_as_torch_does(kernel: HostKernel, arch: str, half: torch.dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(half)
    assert same(convert(kernel, every, torch.float32, arch), every.float())
    # Every value, half a step above it (a tie) and the neighbours of the tie; NaN whose payload would carry; subnormals
    bits = every.float().view(torch.int32)
    tie = 1 << (15 if half == torch.bfloat16 else 12)
    near = torch.cat([bits + d for d in (0, tie - 1, tie, tie + 1)])
    random = torch.randint(-(1 << 31), 1 << 31, (100_003,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0x7F800000, 0x7F800001, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x7FFFFFFF, -1, 1])
    wide = torch.cat([near, random, special.to(torch.int32)]).view(torch.float32)
    assert same(convert(kernel, wide, half, arch), wide.to(half))


@pytest.mark.parametrize("arch", HERE)
def test_exp_is_accurate_down_to_the_subnormal_numbers(kernel: HostKernel, arch: str):
    x = torch.cat([-torch.rand(50_000) * 104, -torch.rand(50_000), torch.tensor([0.0, -0.0, -87.4, -103.9])])
    exact = x.double().exp()
    y = convert(kernel, x, torch.float32, arch, exp=True)
    ulp = torch.maximum(exact * 2.0**-23, torch.tensor(2.0**-149, dtype=torch.float64))
    assert float(((y - exact).abs() / ulp).max()) < 1.5
    ends = convert(kernel, torch.tensor([-torch.inf, -1e30, -105.0, torch.nan]), torch.float32, arch, exp=True)
    assert ends[:3].tolist() == [0, 0, 0]
    assert ends[3].isnan()
    fast = convert(kernel, x.to(torch.bfloat16), torch.bfloat16, arch, exp=True)
    assert float((fast.float() - x.to(torch.bfloat16).float().exp()).abs().max()) <= 1.01 * 2.0**-9  # half a step


def test_the_source_names_its_parameters_and_is_kept_beside_the_binary(kernel: HostKernel, kernels: Path):
    x = torch.arange(5.0)
    y = torch.empty(5, dtype=torch.bfloat16)
    kernel(Args(y, x, 5), Params(torch.float32, torch.bfloat16))
    assert y.tolist() == [0, 1, 2, 3, 4]
    (folder,) = kernels.glob("convert-*")
    text = (folder / "kernel.cpp").read_text()
    assert text.startswith("\n#include <tilewright/host/exponential.h>")
    assert "    using X = float;\n    using Y = bf16;\n    static constexpr bool kExp = false;\n" in text


def test_compiled_once_with_one_line_and_found_again(kernel: HostKernel, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "tilewright")
    x, y = torch.ones(3), torch.empty(3)
    params = Params(torch.float32, torch.float32)
    for _ in range(3):
        kernel(Args(y, x, 3), params)
    cache.forget()
    HostKernel(kernel.file, "convert", Args)(Args(y, x, 3), params)  # from disk
    lines = [r.message for r in caplog.records if "compiling" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith("compiling convert<X=float, Y=float, kExp=false> with g++ ")


def test_without_a_compiler_what_is_cached_runs_and_the_rest_says_what_to_install(
    kernel: HostKernel, monkeypatch: pytest.MonkeyPatch
):
    x, y = torch.ones(3), torch.zeros(3)
    kernel(Args(y, x, 3), Params(torch.float32, torch.float32))
    cache.forget()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", "/nowhere")
    assert get_compiler("host").version() is None
    again = HostKernel(kernel.file, "convert", Args)
    y.zero_()
    again(Args(y, x, 3), Params(torch.float32, torch.float32))
    assert y.tolist() == [1, 1, 1]
    with pytest.raises(BackendError, match=r"g\+\+"):
        again(Args(y, x, 3), Params(torch.float32, torch.float64))


@pytest.mark.parametrize(("said", "version"), [
    ("g++ (Debian 12.2.0-14) 12.2.0\\nCopyright (C) 2022 Free Software Foundation, Inc.", "g++ 12.2.0"),
    ("g++ (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)\\nCopyright (C) 2024 Free Software Foundation, Inc.", "g++ 14.2.1"),
    ("g++ (GCC) 10.2.1\\nCopyright (C) 2020 Free Software Foundation, Inc.", None),
    ("Apple clang version 16.0.0 (clang-1600.0.26.3)", None),
])  # fmt: skip
def test_only_gcc_from_11_on_will_do(said: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "g++"
    script.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("PATH", "/nowhere")
    assert get_compiler("host").version() == version


def test_without_a_path_the_compiler_finds_its_linker_too(kernel: HostKernel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("PATH")
    y = torch.empty(3)
    kernel(Args(y, torch.ones(3), 3), Params(torch.float32, torch.float32))
    assert torch.equal(y, torch.ones(3))


def test_a_mistake_in_the_source_is_shown(kernel: HostKernel):
    kernel.file.write_text(CONVERT.replace("Config::kExp", "Config::kMissing"))
    with pytest.raises(CompileError, match=r"cannot compile convert for .*\n.*kMissing") as raised:
        kernel(Args(torch.ones(1), torch.ones(1), 1), Params(torch.float32, torch.float32))
    assert "kernel.cpp" in raised.value.log


def test_a_wrong_number_of_arguments_is_refused_before_it_is_compiled(kernel: HostKernel):
    short = HostKernel(kernel.file, "convert", Short)
    with pytest.raises(InputError, match=r"has the parameters y, x, n, threads; its arguments are y, x, threads"):
        short(Short(torch.ones(1), torch.ones(1)), Params(torch.float32, torch.float32))


def test_a_binary_that_is_not_on_disk_is_loaded_all_the_same(kernel: HostKernel, kernels: Path):
    artifact = kernel.compile(Params(torch.float32, torch.float32))
    x = torch.ones(40)
    for gone in (replace(artifact, path=None), replace(artifact, path=kernels / "gone.so")):
        y = torch.zeros(40)
        kernel._load(gone)(y.data_ptr(), x.data_ptr(), 40, 1)
        assert torch.equal(x, y)


def test_collecting_leaves_a_job_and_launches_nothing(kernel: HostKernel):
    x, y = torch.ones(3), torch.zeros(3)
    with collect("cpu") as collector:
        kernel(Args(y, x, 3), Params(torch.float32, torch.float32))
        kernel(Args(y, x, 3), Params(torch.float32, torch.float32))
    assert y.tolist() == [0, 0, 0]
    (job,) = collector.jobs
    assert job.name == "convert"
    assert job.compile().key.arch == architecture()


_ONE_RUNTIME = """
import os, torch, tilewright.ops as ops
torch.set_num_threads(2)
x = torch.randn(64, 4096)
expected = ops.softmax(x, backend="torch")
first = ops.softmax(x, backend="cpu")
assert torch.allclose(first, expected)
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
assert len(runtimes) == 1, runtimes
child = os.fork()
if child == 0:  # the parent's pool of threads is not here: entering it would hang, as torch's own large operations do
    again = ops.softmax(x, backend="cpu")
    os._exit(0 if again[-1].tolist() == first[-1].tolist() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_torchs_openmp_runtime_is_shared_and_a_forked_child_does_not_hang(kernels: Path):
    done = subprocess.run([sys.executable, "-c", _ONE_RUNTIME], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_hold_no_runtime_of_their_own(kernel: HostKernel):
    artifact = kernel.compile(Params(torch.float32, torch.float32))
    assert b"libgomp" not in artifact.binary
    assert ctypes.CDLL(None).GOMP_parallel  # torch's, which they find
