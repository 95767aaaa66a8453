"""NVRTC in process: our headers, what is known of a cubin, the debug switches, and errors that name the line."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.jit.cuda_parts import COPY, INSTANCES, PROBE, disassembler

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.jit.compilers import CompileError, Source, cuda_build, get_compiler, nvrtc, nvrtc_program
from tilewright.jit.compilers.cubin import facts
from tilewright.jit.cuda_launch import FLAGS, INCLUDE
from tilewright.jit.selftest import Tile, tma_copy, wgmma_tile

pytestmark = pytest.mark.skipif(nvrtc.compiler.version() is None, reason="NVRTC is not installed")
HEADERS = sorted(path.name for path in (INCLUDE / "tilewright").glob("*.cuh"))
WGMMA_SIZES = range(8, 257, 8)
# ptxas keeps 32 registers of 64 floats that are all live at once
SPILLING = (
    "__global__ void spilling(float* p) {\n"
    "    float a[64];\n"
    "    for (int i = 0; i < 64; ++i) a[i] = p[i * threadIdx.x];\n"
    "    __syncthreads();\n"
    "    for (int i = 0; i < 64; ++i) p[i] = a[63 - i] * a[i];\n"
    "}\n"
)


def build(text, name="probe", flags=FLAGS):
    return nvrtc.compiler.compile(Source(text, name, "sm_90a", flags, (INCLUDE,)))


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_stands_alone(header):
    build(f"#include <tilewright/{header}>\n{PROBE}")


@pytest.mark.parametrize("element", ["bfloat16", "float16", "float8_e4m3"])
def test_wgmma_knows_every_size(element):
    """Each size as one wgmma of PTX, in a kernel that keeps every accumulator alive."""
    calls = "\n".join(
        f"    {{ float d[{n // 2}]; for (float& x : d) x = *out; wgmma_fence();\n"
        f"      wgmma<{n}, {element}>(d, a, b, true); wgmma_commit(); wgmma_wait<0>(d);\n"
        f"      for (float x : d) *out += x; }}"
        for n in WGMMA_SIZES
    )
    text = (
        "#include <tilewright/wgmma.cuh>\nusing namespace tilewright;\n"
        f"__global__ void __launch_bounds__(128) every(float* out, u64 a, u64 b) {{\n{calls}\n}}\n"
    )
    options = ["-arch=compute_90a", *FLAGS, f"-I{INCLUDE}"]  # PTX only: ptxas would take seconds
    program = nvrtc_program.compiled(nvrtc_program.Request(text, "every.cu", options))
    ptx = program.ptx.decode()
    assert not program.error, program.log
    found = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k", ptx)]
    assert found == list(WGMMA_SIZES)


@pytest.mark.parametrize("size", [12, 264])
def test_wgmma_refuses_other_sizes_in_words(size):
    text = (
        "#include <tilewright/wgmma.cuh>\n"
        "__global__ void wrong(float* out) {\n"
        f"    float d[{size // 2}];\n"
        f"    tilewright::wgmma<{size}, tilewright::bfloat16>(d, 0, 0, true);\n"
        "}\n"
    )
    with pytest.raises(CompileError, match="wgmma has N = 8, 16"):
        build(text)


def test_the_swizzle_is_the_hardwares():
    """Chunks of eight rows of 128 bytes, written down from the PTX manual's figure; and it is its own inverse."""
    rows = "\n".join(
        f'static_assert(swizzle<128>({row} * 128 + {chunk} * 16) == {row} * 128 + {chunk ^ row} * 16, "128");'
        for row in range(8)
        for chunk in range(8)
    )
    others = "\n".join(
        f'static_assert(swizzle<{span}>(swizzle<{span}>({at})) == {at}, "inverse");'
        f'static_assert(swizzle<{span}>({at}) / {span} == {at // span}, "same row");'
        for span in (32, 64, 128)
        for at in range(0, 1024, 48)
    )
    rest = 'static_assert(swizzle<64>(128 + 16) == 128 && swizzle<32>(128 + 16) == 128 && swizzle<0>(400) == 400, "x");'
    build(f"#include <tilewright/swizzle.cuh>\nusing namespace tilewright;\n{rows}\n{others}\n{rest}\n{PROBE}")


def test_facts_agree_with_cuobjdump(kernels, tmp_path):
    cuobjdump = disassembler()
    spilling = build(SPILLING, flags=(*FLAGS, "--maxrregcount=32")).binary
    with_instruction = {name: (kernel, params) for kernel, params, names in INSTANCES for name in names}
    cubins = [spilling, *(kernel.compile(params, "sm_90").binary for kernel, params in with_instruction.values())]
    counted = set()
    for cubin in cubins:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True)
        sass = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True).stdout
        found = facts(cubin)
        (shown,) = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage.stdout + usage.stderr)
        assert (found.symbol, found.registers, found.stack_bytes) == (shown[0], int(shown[1]), int(shown[2]))
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass, re.MULTILINE)
        for name in ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDL", "STL"):
            assert found.instructions.get(name, 0) == opcodes.count(name), (found.symbol, name)
        counted |= found.instructions.keys()
    assert counted >= {"HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDL", "STL"}


def test_facts_refuse_what_is_no_cubin_of_one_kernel():
    with pytest.raises(BackendError, match="not a cubin"):
        facts(b"// PTX")
    with pytest.raises(BackendError, match="holds 2 kernels"):
        build(f"{PROBE}\n{PROBE.replace('probe', 'another')}")


def test_spills_are_counted():
    info = build(SPILLING, flags=(*FLAGS, "--maxrregcount=32")).info
    assert info["spill_stores"] > 0
    assert info["spills"] == info["instructions"]["STL"] + info["instructions"]["LDL"] > 0  # the tuner reads it
    assert info["spill_loads"] > 0
    assert info["instructions"]["STL"] * 4 <= info["spill_stores"] * 4
    assert (build(SPILLING).info["spill_stores"], build(SPILLING).info["spills"]) == (0, 0)


def test_a_performance_warning_of_ptxas_is_passed_on(caplog):
    """Reading an accumulator while its wgmma runs makes ptxas wait after each."""
    text = (
        "#include <tilewright/wgmma.cuh>\nusing namespace tilewright;\n"
        "__global__ void __launch_bounds__(128) early(float* out, u64 a, u64 b) {\n"
        "    float d[4] = {};\n    wgmma_fence();\n    wgmma<8, bfloat16>(d, a, b, true);\n"
        "    d[0] += out[1];\n    wgmma<8, bfloat16>(d, a, b, true);\n    wgmma_commit();\n    wgmma_wait<0>(d);\n"
        "    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];\n}\n"
    )
    info = build(text, "early").info
    assert len(info["warnings"]) == 1
    assert "wgmma.mma_async instructions are serialized" in info["warnings"][0]
    assert "early for sm_90a" in caplog.text


def test_an_error_names_file_line_and_reason():
    with pytest.raises(CompileError) as caught:
        build("\n__global__ void k(int* p) { *p = missing; }\n", "broken")
    assert str(caught.value) == (
        'nvrtc cannot compile broken for sm_90a:\nbroken.cu(2): error: identifier "missing" is undefined'
    )
    assert "1 error detected" in caught.value.log
    copy = pickle.loads(pickle.dumps(caught.value))  # as a worker process hands it over
    assert (str(copy), copy.log) == (str(caught.value), caught.value.log)


def test_an_unknown_flag_is_an_error():
    with pytest.raises(CompileError, match="--no-such-flag"):
        build(PROBE, flags=("--no-such-flag",))


def test_switches_report_and_dump(kernels, monkeypatch, caplog):
    for name in ("DEBUG", "PRINT_COMMAND", "PTXAS_VERBOSE", "DUMP_PTX", "DUMP_SASS"):
        monkeypatch.setenv(f"TILEWRIGHT_JIT_{name}", "1")
    settings.reload()
    disassembler()
    built = build(PROBE)
    assert b".entry probe" in built.files["ptx"]
    assert b"EXIT" in built.files["sass"]
    assert f"nvrtc -arch=sm_90a -std=c++17 --ptxas-options=-v -I{INCLUDE} probe.cu" in caplog.text
    assert "nvrtc compiled probe for sm_90a in" in caplog.text
    assert "ptxas info    : Used" in caplog.text


def test_without_switches_nothing_is_said_and_nothing_kept(kernels, caplog):
    assert build(PROBE).files == {}
    assert caplog.text == ""


def test_a_missing_disassembler_is_said_once(monkeypatch, caplog, kernels):
    monkeypatch.setattr(cuda_build, "find_tool", lambda name: None)
    assert cuda_build._sass(b"") == {}
    assert cuda_build._sass(b"") == {}
    assert caplog.text.count("needs cuobjdump or nvdisasm") == 1


def test_the_version_is_that_of_the_library():
    assert get_compiler("nvrtc").version() == nvrtc._version_from_output()
    library = nvrtc._loaded()
    assert library is not None  # it has compiled
    assert library.name.startswith("libnvrtc.so")
    assert nvrtc._wheel_version(Path("/usr/lib/libnvrtc.so.13")) is None


def test_a_cached_kernel_needs_no_compiler_loaded():
    """The version alone: a process that finds everything in the cache must not pay for loading NVRTC."""
    code = "from tilewright.jit.compilers import nvrtc; nvrtc.compiler.version(); print(nvrtc._loaded())"
    if nvrtc._wheel_version(None) is None:
        pytest.skip("NVRTC is not installed as a wheel")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_without_cuda_core_there_is_no_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    nvrtc._version.cache_clear()
    try:
        assert nvrtc.compiler.version() is None
    finally:
        nvrtc._version.cache_clear()
    assert "pip install 'tilewright[cuda]'" in nvrtc.compiler.install()


def test_threads_compile_at_once():
    import concurrent.futures

    texts = [PROBE.replace("probe", f"probe{i}") for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        symbols = [built.info["symbol"] for built in pool.map(build, texts)]
    assert symbols == [f"probe{i}" for i in range(8)]


def test_results_do_not_depend_on_where_the_headers_lie(tmp_path, kernels):
    """A copy of the headers elsewhere gives the same bytes: an installation may move."""
    import shutil

    shutil.copytree(INCLUDE, tmp_path / "moved")
    shutil.copytree(tma_copy.file.parent, tmp_path / "selftest")
    text = tma_copy.source(COPY)
    here = nvrtc.compiler.compile(Source(text, "copy", "sm_90a", FLAGS, (tma_copy.file.parent, INCLUDE)))
    there = nvrtc.compiler.compile(Source(text, "copy", "sm_90a", FLAGS, (tmp_path / "selftest", tmp_path / "moved")))
    assert here.binary == there.binary


def test_a_wrong_layout_is_refused_in_words():
    text = wgmma_tile.source(Tile(4, 2, torch.bfloat16, torch.float32))
    source = Source(text, "tile", "sm_90a", FLAGS, (wgmma_tile.file.parent, INCLUDE))
    with pytest.raises(CompileError, match="each tile begins at a multiple of 1024 bytes"):
        nvrtc.compiler.compile(source)
