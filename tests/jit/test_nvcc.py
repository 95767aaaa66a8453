"""nvcc in a process of its own: the same kernels, flags and facts as NVRTC, and its ways to be missing or to hang."""

import pytest
from tests.jit.cuda_parts import INSTANCES, PROBE, instance_name

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.jit import cache
from tilewright.jit.compilers import CompileError, Source, cuda_build, nvcc, nvrtc
from tilewright.jit.cuda_launch import FLAGS, INCLUDE

pytestmark = pytest.mark.skipif(nvcc.compiler.version() is None, reason="nvcc is not installed")


def build(text, name="probe", flags=FLAGS):
    return nvcc.compiler.compile(Source(text, name, "sm_90a", flags, (INCLUDE,)))


@pytest.mark.parametrize(("kernel", "params", "instructions"), INSTANCES[:2], ids=instance_name)
def test_it_makes_what_nvrtc_makes(kernels, monkeypatch, kernel, params, instructions):
    monkeypatch.setenv("TILEWRIGHT_JIT_COMPILER", "nvcc")
    settings.reload()
    artifact = kernel.compile(params, "sm_90")
    assert artifact.key.compiler.startswith("nvcc ")
    assert instructions.items() <= artifact.info["instructions"].items()
    assert artifact.info["spill_stores"] == 0
    if nvrtc.compiler.version() == nvcc.compiler.version():
        monkeypatch.setenv("TILEWRIGHT_JIT_COMPILER", "nvrtc")
        settings.reload()
        other = kernel.compile(params, "sm_90").info
        for fact in ("symbol", "registers", "shared_bytes", "parameters", "instructions"):
            assert artifact.info[fact] == other[fact]
    assert cache.info().entries >= 1


def test_an_error_names_line_and_reason():
    with pytest.raises(
        CompileError, match=r'^nvcc cannot compile broken for sm_90a:\n.*broken.cu\(2\): error: .*"missing"'
    ):
        build("\n__global__ void k(int* p) { *p = missing; }\n", "broken")


def test_switches_report_and_dump(kernels, monkeypatch, caplog):
    for name in ("PRINT_COMMAND", "PTXAS_VERBOSE", "DUMP_PTX"):
        monkeypatch.setenv(f"TILEWRIGHT_JIT_{name}", "1")
    settings.reload()
    assert b".entry probe" in build(PROBE).files["ptx"]
    assert "-gencode=arch=compute_90a,code=sm_90a --cubin -std=c++17" in caplog.text
    assert "ptxas info    : Used" in caplog.text


def test_a_compiler_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(nvcc, "_TIMEOUT", 0.01)
    with pytest.raises(CompileError, match="no result after"):
        build(PROBE)


def test_cuda_home_comes_before_path(monkeypatch, tmp_path):
    own = tmp_path / "bin" / "nvcc"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.2'\n")
    own.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_build.find_tool("nvcc") == own
    nvcc._version.cache_clear()
    try:
        assert nvcc.compiler.version() == "99.1.2"
    finally:
        nvcc._version.cache_clear()


def test_without_nvcc_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvcc, "find_tool", lambda name: None)
    nvcc._version.cache_clear()
    try:
        assert nvcc.compiler.version() is None
    finally:
        nvcc._version.cache_clear()
    with pytest.raises(BackendError, match="nvcc was not found; install the CUDA toolkit"):
        build(PROBE)
