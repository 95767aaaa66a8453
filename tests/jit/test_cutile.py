"""cuTile kernels: specialised, keyed, compiled, collected, launched and taped; with cuda.tile and without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.jit import cache, cutile_launch, driver
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, Source, get_compiler, tileiras
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.jit.tape import listen

needs_compiler = pytest.mark.skipif(tileiras.compiler.version() is None, reason=tileiras.compiler.install())
FACTOR = 2.0


def twice(x):
    return x * FACTOR


def scale_kernel(y, x, n, factor, BLOCK: ct.Constant[int]):
    """y = 2 factor x + n."""
    at = (ct.bid(0), ct.arange(BLOCK, dtype=ct.int32))
    ct.scatter(y, at, (twice(ct.gather(x, at).astype(ct.float32)) * factor + n).astype(y.dtype))


def wrong_kernel(y, BLOCK: ct.Constant[int]):
    ct.scatter(y, (ct.arange(BLOCK, dtype=ct.int32),), 1.0)  # y has two dimensions


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty kernel cache for every test."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    cache.forget()
    cutile_launch._compiler.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    settings.reload()
    cache.forget()
    cutile_launch._compiler.cache_clear()


@pytest.fixture
def kernel():
    return CutileKernel(scale_kernel)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def args_of(x):
    return (torch.empty_like(x), x, 3, 0.5)


FOUR = Hints(num_worker_warps=4)


def key_of(kernel, x, constants=(64,), hints=FOUR, arch="sm_90"):
    with collect(arch) as collector:
        kernel((8,), args_of(x), constants, hints)
    return collector.jobs[0].key


# What a binary is made for


def test_equal_calls_share_a_key_and_every_assumption_changes_it(kernel):
    base = key_of(kernel, meta(8, 64))
    assert key_of(kernel, meta(9, 128)) == base, "sizes do not matter, only what divides them"
    assert key_of(kernel, meta(8, 256)[:, 8:72]) == base, "an offset of 16 bytes is as good as none"
    others = [
        key_of(kernel, meta(8, 64, dtype=torch.float16)),
        key_of(kernel, meta(8, 63)),  # length
        key_of(kernel, meta(8, 65)[:, :64]),  # stride
        key_of(kernel, meta(8, 256)[:, 1:65]),  # pointer
        key_of(kernel, meta(64, 8).T),  # no unit stride
        key_of(kernel, meta(8, 64), constants=(128,)),
        key_of(kernel, meta(8, 64), hints=Hints(8)),
        key_of(kernel, meta(8, 64), hints=Hints(4, occupancy=2)),
        key_of(kernel, meta(8, 64), arch="sm_100"),
    ]
    assert len({base.request, *(key.request for key in others)}) == 1 + len(others)


def test_a_key_holds_the_text_of_the_kernel_and_of_what_it_uses_and_no_path(kernel):
    key = key_of(kernel, meta(8, 64))
    assert "FACTOR = 2.0" in key.source
    assert key.source.index("def twice") < key.source.index("def scale_kernel")
    assert "BLOCK = 64" in key.flags
    assert "num_worker_warps=4" in key.flags
    assert str(Path.cwd()) not in " ".join(key.flags)
    assert (key.kind, key.arch, key.source_suffix) == ("cutile", "sm_90", "py")


def test_a_constant_of_the_module_is_part_of_the_key(kernel, monkeypatch):
    before = key_of(kernel, meta(8, 64))
    monkeypatch.setitem(scale_kernel.__globals__, "FACTOR", 3.0)
    cutile_launch.source.cache_clear()
    assert key_of(kernel, meta(8, 64)).request != before.request
    cutile_launch.source.cache_clear()


def test_wrong_numbers_of_arguments_and_wrong_machines_are_named(kernel):
    with collect("sm_90"), pytest.raises(BackendError, match=r"4 arguments and 2 constants.* y, x, n, factor, BLOCK"):
        kernel((8,), args_of(meta(8, 64)), (64, 1), Hints())
    with collect("gfx942"), pytest.raises(BackendError, match="gfx942.*needs an NVIDIA GPU"):
        kernel((8,), args_of(meta(8, 64)), (64,), Hints())


# Compiling


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(kernel, arch):
    made = kernel.compile(arch, args_of(meta(8, 1024)), (1024,), Hints(num_worker_warps=4))
    assert made.binary[:4] == b"\x7fELF"
    assert made.info["symbol"] == "scale_kernel"
    assert made.info["parameters"] == [8, 4, 4, 4, 4] * 2 + [4, 4]
    assert made.info["threads"] == 128
    assert made.info["registers"] > 0
    assert made.info["spills"] == made.info["stack_bytes"] == 0
    assert made.path is not None and (made.path.parent / "kernel.py").read_text().startswith("FACTOR")
    assert str(Path.cwd()).encode() not in made.binary


@needs_compiler
def test_hints_reach_the_compiler(kernel):
    def info(hints):
        return kernel.compile("sm_90", args_of(meta(8, 8192, dtype=torch.float32)), (8192,), hints).info

    assert info(Hints(num_worker_warps=8))["threads"] == 256
    assert info(Hints(4, occupancy=16))["registers"] <= 32 < info(Hints(4))["registers"]
    with pytest.raises(ValueError, match="occupancy"):
        info(Hints(4, occupancy=99))


@needs_compiler
def test_a_shell_that_points_to_another_toolkit_does_no_harm(kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", "/usr/local/cuda")
    assert kernel.compile("sm_90", args_of(meta(8, 64)), (64,), Hints()).binary
    assert os.environ["CUDA_HOME"] == str(tmp_path), "this process keeps its environment"
    bytecode = cache.find(key_of(kernel, meta(8, 64), hints=Hints())).path.parent / "kernel.tileirbc"
    refused = subprocess.run(
        [tileiras.toolkit().program, bytecode, "-o", tmp_path / "out", "--gpu-name", "sm_90"], check=False
    )
    assert refused.returncode == 5, "tileiras no longer needs the care that `tileiras._environment` takes"


@needs_compiler
def test_an_error_in_a_kernel_names_it_and_the_line():
    with pytest.raises(CompileError, match=r"cannot compile wrong_kernel for sm_90:(?s:.*)rank 2"):
        CutileKernel(wrong_kernel).compile("sm_90", (meta(8, 64),), (64,), Hints())


@needs_compiler
def test_a_refusal_without_a_line_says_what_it_may_mean():
    source = tileiras.TileSource("", "nonsense", "sm_90", ("-O3",), bytecode=b"no bytecode")
    with pytest.raises(CompileError, match=r"cannot compile nonsense(?s:.*)exit status"):
        get_compiler("tileiras").compile(source)


@pytest.mark.parametrize(
    ("files", "lacking"),
    [
        (("bin/tileiras", "lib/libnvvm.so.4"), "bin/ptxas.*nvidia-cuda-nvcc==13.4"),
        (("bin/tileiras", "bin/ptxas"), "libnvvm.so.4.*nvidia-nvvm==13.4"),
        (("bin/tileiras", "bin/ptxas", "lib/libnvvm.so.4"), None),
        (("bin/tileiras", "bin/ptxas", "nvvm/lib64/libnvvm.so.4"), None),
    ],
)
def test_what_tileiras_lacks_beside_it_is_named(tmp_path, files, lacking, monkeypatch):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'release 13.4, V13.4.92'\n")
        path.chmod(0o755)
    toolkit = tileiras.Toolkit(tmp_path, "13.4.92")
    if lacking is None:
        assert tileiras.missing(toolkit) is None
        return
    monkeypatch.setattr(tileiras, "toolkit", lambda: toolkit)
    with pytest.raises(CompileError, match=lacking):
        tileiras.compiler.compile(tileiras.TileSource("", "k", "sm_90", bytecode=b""))


def test_a_ptxas_of_another_release_is_named(tmp_path):
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    ptxas.chmod(0o755)
    said = tileiras._advice(tileiras.Toolkit(tmp_path, "13.4.92"), "error: failed to compile Tile IR program")
    assert "ptxas next to it 13.0.88" in said


def test_a_plain_source_is_not_what_tileiras_takes():
    with pytest.raises(AssertionError):
        tileiras.compiler.compile(Source("text", "k", "sm_90"))


# Launching


@pytest.fixture
def fake_driver(monkeypatch):
    """Records loads and launches; CPU tensors stand for those of device 0, whose stream is 77."""
    seen = []

    class Launch:
        def __init__(self, loaded, signature, *, block):
            seen.append(("load", loaded, signature, block))

        def __call__(self, *args):
            seen.append(("launch", *args))

    monkeypatch.setattr(driver, "load", lambda binary, device, symbol: (device, symbol))
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(cutile_launch, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(cutile_launch, "_current_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor's device
    return seen


@needs_compiler
def test_a_call_loads_once_and_passes_pointer_shape_and_strides(kernel, fake_driver):
    x, y = torch.zeros(2, 128, dtype=torch.bfloat16)[:, :64], torch.zeros(2, 64, dtype=torch.bfloat16)
    for _ in range(2):
        kernel((2,), (y, x, 3, 0.5), (64,), Hints(4))
    assert [e[0] for e in fake_driver] == ["load", "launch", "launch"]
    assert fake_driver[0][2:] == ("PiiiiPiiiiif", (1, 1, 1))
    shapes = (y.data_ptr(), 2, 64, 64, 1, x.data_ptr(), 2, 64, 128, 1, 3, 0.5)
    assert fake_driver[1] == ("launch", 2, 1, 1, 77, None, *shapes)


@needs_compiler
def test_a_tape_puts_the_pointers_of_other_tensors_in(kernel, fake_driver, monkeypatch):
    from tilewright.jit import tape

    monkeypatch.setattr(tape, "_current_stream", lambda device: 78)
    x, y = torch.zeros(2, 64), torch.zeros(2, 64)
    with listen() as taping:
        kernel((2,), (y, x, 3, 0.5), (64,), Hints(4))
    taping.finish((x, y)).replay(0, [111, 222])
    assert fake_driver[-1] == ("launch", 2, 1, 1, 78, None, 222, 2, 64, 64, 1, 111, 2, 64, 64, 1, 3, 0.5)


@needs_compiler
def test_an_integer_of_more_than_32_bits_is_refused_before_the_launch(kernel, fake_driver):
    with pytest.raises(BackendError, match=r"parameter n is 2147483648; .* to 2147483647"):
        kernel((2,), (torch.zeros(2, 64), torch.zeros(2, 64), 2**31, 0.5), (64,), Hints(4))
    assert [e[0] for e in fake_driver] == ["load"]


def test_a_size_beyond_32_bits_is_refused(kernel):
    with collect("sm_90"), pytest.raises(BackendError, match="32 bits, given"):
        kernel((8,), args_of(meta(2, 1 << 31)), (64,), Hints())


def test_a_grid_of_no_blocks_needs_no_kernel(kernel, fake_driver):
    kernel((0,), args_of(torch.zeros(0, 64)), (64,), Hints(4))
    assert fake_driver == []


# Without cuda.tile


def python(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


HIDE = """
import importlib.machinery
finder = importlib.machinery.PathFinder
real = finder.find_spec
finder.find_spec = lambda name, path=None, target=None: None if name == "cuda.tile" else real(name, path, target)
"""
SHOW = """
import torch
import tilewright.ops
from tilewright.dispatch import contract, implementations
from tilewright.jit import cache
from tilewright.jit.collect import collect
from tilewright.ops.rows import RowsBucket
op = contract("rms_norm").forward
implementation = implementations(op.op, op.direction)["cutile"]
x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
with collect("sm_90") as collector:
    config = implementation.configure(RowsBucket(8, 4096), x.dtype)
    implementation.launch((x,), x, x[0], 1e-6, 0.0, False, config=config)
(job,) = collector.jobs
print(job.key.request)
"""


def test_kernels_can_be_read_and_keyed_without_cuda_tile():
    """The request part of a key is the same with and without it: so a bundle's binaries are found."""
    without = python(HIDE + SHOW)
    assert without.returncode == 0, without.stderr
    assert without.stdout == python(SHOW).stdout


def test_without_cuda_tile_compiling_says_what_to_install():
    done = python(HIDE + SHOW + "job.compile()")
    assert "Error: rms_norm_kernel for sm_90 is not in the kernel cache" in done.stderr
    assert "pip install 'tilewright[cutile]'" in done.stderr


def test_without_cuda_tile_the_language_says_what_to_install():
    done = python(HIDE + "from tilewright.jit.cutile_language import ct; ct.Constant[int]; ct.arange(4)")
    assert "BackendError: ct.arange needs cuda.tile, which is not installed: pip install" in done.stderr


@needs_compiler
def test_what_one_process_compiled_another_runs_without_cuda_tile():
    assert python(SHOW + "job.compile()").returncode == 0
    done = python(HIDE + SHOW + "print(job.compile().info['symbol'])")
    assert done.stdout.split()[-1:] == ["rms_norm_kernel"], done.stderr
