"""CudaKernel: the source it writes, what it refuses, what it compiles for, and how few things a call does."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.jit.cuda_parts import COPY, INSTANCES, instance_name, op_kernels

from tilewright import settings
from tilewright.errors import BackendError, InputError
from tilewright.jit import cuda_launch, selftest, tape
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, nvrtc, nvrtc_program
from tilewright.jit.compilers.kernel_args import I32, I64, Map, Pointer, parameter_names
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.selftest import Copy, CopyArgs, tma_copy
from tilewright.jit.tensor_map import TensorMap, tensor_map

needs_nvrtc = pytest.mark.skipif(nvrtc.compiler.version() is None, reason="NVRTC is not installed")


class Everything(NamedTuple):
    kBlock: int
    kLarge: int
    kCausal: bool
    kScale: float
    Element: torch.dtype
    Policy: str


class One(NamedTuple):
    p: Pointer


class Twice(NamedTuple):
    """Arguments of the kernel of the guide."""

    x: Pointer
    y: Pointer
    columns: I32


class Wide(NamedTuple):
    """The names of tma_copy's parameters, and a size that is not its own."""

    source: Map
    target: Map
    rows: I32
    columns: I64


EVERYTHING = Everything(64, 2**40, True, 0.1, torch.bfloat16, "Pair<float, int>")


def anything(**fields):
    """A NamedTuple with these fields, annotated as their values are."""
    kind = NamedTuple("Anything", [(name, type(value)) for name, value in fields.items()])
    return kind(**fields)


# --------------------------------------------------------------------------------------------------------------- source


def test_the_source_is_what_a_person_would_write(tmp_path):
    file = tmp_path / "my_kernel.cuh"
    file.write_text("template <typename Config> __global__ void my_kernel(int* p) {}")
    kernel = CudaKernel(file, "my_kernel", One, archs=("sm_90a",))
    assert kernel.source(EVERYTHING) == (
        '#include "my_kernel.cuh"\n'
        "\n"
        "struct Config {\n"
        "    static constexpr int kBlock = 64;\n"
        "    static constexpr long long kLarge = 1099511627776ll;\n"
        "    static constexpr bool kCausal = true;\n"
        "    static constexpr float kScale = 0x1.999999999999ap-4f;  // 0.1\n"
        "    using Element = tilewright::bfloat16;\n"
        "    using Policy = Pair<float, int>;\n"
        "};\n"
        "\n"
        "// Instantiates the kernel\n"
        "static_assert(&tilewright::my_kernel<Config> != nullptr);\n"
    )


def test_the_annotation_decides_the_type():
    """Equal keys of the plan cache must not mean different sources: 1 == 1.0 == True in Python."""
    assert tma_copy.source(COPY) == tma_copy.source(COPY._replace())
    ints, floats = anything(kX=1), anything(kX=1.0)
    assert tma_copy.source(ints) != tma_copy.source(floats)
    with pytest.raises(InputError, match="kX: True does not fit its annotation"):
        tma_copy.source(ints._replace(kX=True))
    assert tma_copy.source(floats._replace(kX=1)) == tma_copy.source(floats)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (anything(block=1), "is named like kBlockM"),
        (anything(Block=1), "is named like kBlockM"),
        (anything(kElement=torch.float32), "is named like Element"),
        (anything(kX=float("inf")), "does not fit"),
        (anything(kX=2**63), "does not fit"),
        (anything(T=torch.complex64), "does not fit"),
        (anything(T="float; }; int x"), "does not fit"),
        (anything(kX=None), "does not fit"),
        ((1, 2), "NamedTuple"),
    ],
    ids=str,
)
def test_what_a_parameter_cannot_be(params, said):
    with pytest.raises(InputError, match=said):
        tma_copy.source(params)


# -------------------------------------------------------------------------------------------------------------- compile


@needs_nvrtc
def test_a_process_of_its_own_compiles_the_same(kernels):
    texts = "__global__ void right(float* x) { x[0] = 1; }", "__global__ void wrong() { missing(); }"
    right, wrong = (nvrtc_program.Request(text, "kernel.cu", ["-arch=sm_90a"]) for text in texts)
    here = nvrtc_program.compiled(right)
    assert here.cubin
    assert nvrtc_program.in_fresh_process(right) == here
    assert nvrtc_program.in_fresh_process(wrong) == nvrtc_program.compiled(wrong)
    assert "missing" in nvrtc_program.compiled(wrong).log


@needs_nvrtc
def test_a_process_that_ends_is_an_error_that_says_so(kernels, monkeypatch):
    monkeypatch.setattr(nvrtc.compiler, "fresh_process", True)
    monkeypatch.setattr(nvrtc_program.sys, "executable", "/bin/false")
    with pytest.raises(CompileError, match="ended with code 1"):
        tma_copy.compile(COPY, "sm_90a")


@needs_nvrtc
def test_compiled_once_and_found_again(kernels, monkeypatch):
    first = tma_copy.compile(COPY, "sm_90a")
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    assert tma_copy.compile(COPY, "sm_90").binary == first.binary
    assert (first.path.parent / "kernel.cu").read_text() == tma_copy.source(COPY)
    assert first.info["symbol"].startswith("_ZN10tilewright8tma_copy")


@needs_nvrtc
def test_flags_and_dumps_are_part_of_the_key(kernels, monkeypatch):
    plain = tma_copy.compile(COPY, "sm_90a").key
    monkeypatch.setenv("TILEWRIGHT_JIT_LINEINFO", "1")
    settings.reload()
    lines = tma_copy.compile(COPY, "sm_90a")
    assert "-lineinfo" in lines.key.flags
    assert b".debug_line" in lines.binary
    monkeypatch.setenv("TILEWRIGHT_JIT_LINEINFO", "0")
    monkeypatch.setenv("TILEWRIGHT_JIT_DUMP_PTX", "1")
    settings.reload()
    dumped = tma_copy.compile(COPY, "sm_90a")
    assert b"cp.async.bulk.tensor" in (dumped.path.parent / "kernel.ptx").read_bytes()
    assert len({plain.digest, lines.key.digest, dumped.key.digest}) == 3
    assert not any("/" in flag for flag in (*plain.flags, *lines.key.flags, *dumped.key.flags))


def test_without_a_compiler_it_says_what_to_do(kernels, monkeypatch):
    monkeypatch.setattr(nvrtc, "_version", lambda: None)
    with pytest.raises(BackendError, match="tma_copy for sm_90a is not in the kernel cache"):
        tma_copy.compile(COPY, "sm_90a")


@needs_nvrtc
def test_the_kernel_of_the_guide_compiles(kernels, tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "cuda-kernels.md"
    (code,) = re.findall(r"```cpp\n(.*?)```", guide.read_text(), re.DOTALL)
    (tmp_path / "my_op.cuh").write_text(code)
    kernel = CudaKernel(tmp_path / "my_op.cuh", "twice", Twice, archs=("sm_80", "sm_90"))
    params = anything(kThreads=128, Element=torch.bfloat16)
    kernel._check_signature(kernel.compile(params, "sm_86").info["parameters"])
    with pytest.raises(CompileError, match="whole warps"):
        kernel.compile(params._replace(kThreads=100), "sm_90")
    with pytest.raises(CompileError, match='has no member "kThreads"'):
        kernel.compile(anything(kBlock=128, Element=torch.bfloat16), "sm_90")


@pytest.mark.parametrize(
    ("archs", "machine", "chosen"),
    [
        (("sm_90a",), "sm_90", "sm_90a"),
        (("sm_90a",), "sm_90a", "sm_90a"),
        (("sm_80",), "sm_86", "sm_80"),
        (("sm_80", "sm_86", "sm_90a"), "sm_89", "sm_86"),
        (("sm_100f",), "sm_103", "sm_100f"),
        (("sm_90a",), "sm_80", None),
        (("sm_90a",), "sm_100", None),
        (("sm_86",), "sm_80", None),
        (("sm_80",), "sm_90", None),
        (("sm_100a",), "sm_103", None),
        (("sm_90a",), "gfx942", None),
        (("sm_90a",), "cpu", None),
    ],
)
def test_which_machine_runs_which_code(archs, machine, chosen):
    kernel = CudaKernel(Path("k.cuh"), "k", One, archs=archs)
    if chosen:
        assert kernel._arch(machine) == chosen
        return
    with pytest.raises(BackendError, match=rf"k is written for {', '.join(archs)}, and {machine} cannot run that"):
        kernel._arch(machine)


# --------------------------------------------------------------------------------------------------------------- launch


HERE = TensorMap("map", 0, 4096, ())
_MAKE = "tilewright.jit.tensor_map._make"


class Launches:
    """In the place of the driver: notes what is loaded, prepared and launched."""

    def __init__(self):
        self.loaded, self.prepared, self.launched = [], [], []

    def load(self, binary, device, symbol):
        self.loaded.append((device, symbol))
        return symbol

    def prepare(self, loaded, signature, **shape):
        self.prepared.append((signature, shape))
        return lambda *args: self.launched.append(args)


@pytest.fixture
def driver(kernels, monkeypatch):
    made = Launches()
    monkeypatch.setattr(cuda_launch, "load", made.load)
    monkeypatch.setattr(cuda_launch, "Launch", made.prepare)
    monkeypatch.setattr(cuda_launch, "_current_stream", lambda index: 1000 + index)
    monkeypatch.setattr(cuda_launch, "_current_device", lambda: 0)
    return made


def fresh():
    return CudaKernel(tma_copy.file, "tma_copy", CopyArgs, archs=("sm_90a",))


@needs_nvrtc
def test_a_plan_is_made_once(driver):
    kernel, pointer = fresh(), HERE
    for n in (1, 2, 3):
        kernel((n,), CopyArgs(pointer, pointer, 5, 6), COPY, block=32, shared_bytes=64)
    assert len(driver.loaded) == 1
    shape = {"block": (32, 1, 1), "shared_bytes": 64, "cluster": None, "dependent": False, "cooperative": False}
    assert driver.prepared == [("TTii", shape)]
    assert driver.launched == [(n, 1, 1, 1000, None, "map", "map", 5, 6) for n in (1, 2, 3)]


@needs_nvrtc
def test_another_shape_of_launch_loads_nothing_again(driver):
    kernel, pointer = fresh(), HERE
    kernel((1, 2, 3), CopyArgs(pointer, pointer, 5, 6), COPY, block=32)
    kernel((1, 2), CopyArgs(pointer, pointer, 5, 6), COPY, block=64, cluster=(2, 1, 1))
    assert (len(driver.loaded), len(driver.prepared)) == (1, 2)
    assert [call[:3] for call in driver.launched] == [(1, 2, 3), (1, 2, 1)]


@needs_nvrtc
def test_each_device_loads_its_own(driver, monkeypatch):
    kernel, here, there = fresh(), HERE, TensorMap("other", 1, 8192, ())
    current = [0]

    class Device(nullcontext):
        def __init__(self, index):
            super().__init__()
            current[0] = index

        def __exit__(self, *_):
            current[0] = 0

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(cuda_launch, "_current_device", lambda: current[0])
    for pointer in (here, there, here, there):
        kernel((1,), CopyArgs(pointer, pointer, 5, 6), COPY, block=32)
    assert [device for device, _ in driver.loaded] == [0, 1]
    assert [call[3] for call in driver.launched] == [1000, 1001, 1000, 1001]


@needs_nvrtc
def test_a_signature_that_lies_is_caught_before_the_launch(driver):
    kernel = CudaKernel(tma_copy.file, "tma_copy", Wide, archs=("sm_90a",))
    with pytest.raises(BackendError, match=r"'TTiq' says parameters of \[128, 128, 4, 8\] bytes, .*\[128, 128, 4, 4\]"):
        kernel((1,), Wide(HERE, HERE, 5, 6), COPY, block=32)
    assert driver.launched == []


@needs_nvrtc
def test_a_launch_with_tensor_maps_is_taped(driver, monkeypatch):
    monkeypatch.setattr(_MAKE, lambda pointer, *form: TensorMap((pointer, form), 0, pointer, form))
    x, kernel = torch.zeros(64), fresh()
    here = TensorMap("map", 0, x.data_ptr(), ("form",))
    with tape.listen() as listening:
        kernel((1,), CopyArgs(here, here, 5, 6), COPY, block=32)
    assert driver.launched[-1][5] == "map"
    monkeypatch.setattr(tape, "_current_stream", lambda index: 7)
    listening.finish([x]).replay(0, [4096])
    assert driver.launched[-1] == (1, 1, 1, 7, None, (4096, ("form",)), (4096, ("form",)), 5, 6)


@needs_nvrtc
def test_configurations_are_printed_on_request(driver, monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_PRINT_CONFIGS", "1")
    settings.reload()
    kernel = fresh()
    for _ in range(2):
        kernel((1,), CopyArgs(HERE, HERE, 5, 6), COPY, block=32, shared_bytes=64)
    said = "tma_copy on cuda:0: kRows=64, kColumns=64, kStages=4, Element=torch.bfloat16; block 32, shared 64 bytes"
    assert caplog.text.count(said) == 1


def test_a_tensor_of_the_cpu_is_refused():
    with pytest.raises(BackendError, match="first argument is a CUDA tensor or a tensor map; got cpu"):
        fresh()((1,), CopyArgs(torch.zeros(4), HERE, 4, 4), COPY, block=32)


@needs_nvrtc
def test_collecting_compiles_and_launches_nothing(driver):
    kernel, x = fresh(), torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    with collect("sm_90a") as collector:
        for _ in range(2):
            maps = tensor_map(x, (64, 64)), tensor_map(x, (64, 64))
            kernel((1,), CopyArgs(*maps, 64, 64), COPY, block=32)
        kernel((1,), CopyArgs(*maps, 64, 64), Copy(32, 64, 2, torch.float32), block=32)
    assert [job.name for job in collector.jobs] == ["tma_copy", "tma_copy"]
    assert [job.compile().info["stack_bytes"] for job in collector.jobs] == [0, 0]
    assert (driver.loaded, driver.launched) == ([], [])


# ------------------------------------------------------------------------------------------------------------- selftest


def test_the_selftest_tells_a_wrong_result():
    x = torch.zeros(4, 4)
    wrong = x.clone()
    wrong[2, 3] = 5
    assert selftest._difference(wrong, x) == "1 of 16 elements differ, first (2, 3): 5.0 instead of 0.0"
    assert selftest._difference(x, x) is None


def test_the_selftest_reports_errors_of_the_library_and_raises_others(monkeypatch):
    def missing(device):
        raise BackendError("no compiler")

    monkeypatch.setattr(selftest, "PROOFS", {"good": lambda device: None, "bad": missing})
    assert [(proof.name, proof.error) for proof in selftest.run("cpu")] == [("good", None), ("bad", "no compiler")]
    monkeypatch.setattr(selftest, "PROOFS", {"broken": lambda device: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        selftest.run("cpu")


@needs_nvrtc
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 5])
def test_an_integer_of_more_than_32_bits_is_refused_before_the_launch(driver, value):
    with pytest.raises(BackendError, match=rf"tma_copy: parameter columns is {value}; .* to 2147483647"):
        fresh()((1,), CopyArgs(HERE, HERE, 5, value), COPY, block=32)
    assert driver.launched == []
    fresh()((1,), CopyArgs(HERE, HERE, 2**31 - 1, -(2**31)), COPY, block=32)
    assert len(driver.launched) == 1


def test_zeros_of_both_signs_are_one_source():
    """They are one key of what a kernel remembers."""
    assert tma_copy.source(anything(kX=-0.0)) == tma_copy.source(anything(kX=0.0))


@pytest.mark.parametrize("kernel", op_kernels(), ids=instance_name)
def test_every_kernel_of_an_op_names_its_parameters(kernel):
    assert len(parameter_names(kernel.file, kernel.entry)) == len(kernel.signature)


@pytest.mark.parametrize("kernel", op_kernels(), ids=instance_name)
def test_every_kernel_of_an_op_is_compiled_by_the_tests(kernel):
    """Without a GPU `tests/compile` knows of no CUDA kernel but those in INSTANCES."""
    assert any(kernel is compiled for compiled, *_ in INSTANCES), f"add {kernel.entry} to tests/jit/cuda_parts.py"
