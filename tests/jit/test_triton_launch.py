"""Triton kernels compiled for GPUs that are not here, found again, and launched without Triton."""

import importlib.util
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from tests.harness import fake_driver
from tests.harness import kernels as harness
from triton import knobs

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.jit import cache, triton_compile, triton_launch
from tilewright.jit.collect import collect
from tilewright.jit.tape import listen
from tilewright.jit.triton_launch import TritonKernel

NVIDIA, AMD = ("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx950")
ARGS = (torch.zeros(8, 4096, dtype=torch.bfloat16), torch.zeros(8), 4096)
_numbers = itertools.count()

TEXT = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2)

@triton.jit
def scaled(x):
    return x * SCALE

@triton.jit
def kernel(x, y, bias, n, stride, factor, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = scaled(tl.load(x + offsets * stride, mask=offsets < n, other=0.0)) * factor
    tl.store(y + offsets, values, mask=offsets < n)
"""


def load(folder, text=TEXT):
    """The module that `text` is, from a file of its own."""
    path = folder / f"module_{next(_numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("kernels_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scaled_args(**changed):
    """Arguments of `TEXT`'s kernel."""
    values = {"x": torch.zeros(256), "y": torch.zeros(256), "bias": None, "n": 256, "stride": 1, "factor": 0.5}
    return tuple({**values, **changed}.values())


def key(fn, args, constants=(256,), arch="sm_90", **options):
    return triton_compile.request(fn, arch, args, constants, **{"num_warps": 4, "num_stages": 1, **options}).key


# ------------------------------------------------------------------------------------------------- what is asked for


def test_the_request_knows_no_lines_paths_or_machines(tmp_path):
    """So that a machine with a GPU finds what one without compiled."""
    here = key(load(tmp_path).kernel, scaled_args())
    there = key(load(tmp_path, "# moved\n\n\n" + TEXT).kernel, scaled_args())
    assert here.request == there.request
    text = " ".join((*here.flags, here.source))
    assert str(tmp_path) not in text
    assert "site-packages" not in text


def test_the_source_holds_what_the_kernel_calls_before_the_kernel(tmp_path):
    source = triton_compile.source(load(tmp_path).kernel)
    assert source.index("SCALE = constexpr(2)") < source.index("def scaled") < source.index("def kernel")
    assert "@triton.jit" not in source


@pytest.mark.parametrize(
    ("old", "new"),
    [("return x * SCALE", "return x + SCALE"), ("constexpr(2)", "constexpr(3)"), ("* factor", "- factor")],
)
def test_a_change_of_anything_it_uses_is_another_request(tmp_path, old, new):
    assert old in TEXT
    before, after = load(tmp_path).kernel, load(tmp_path, TEXT.replace(old, new)).kernel
    assert key(before, scaled_args()).request != key(after, scaled_args()).request


@pytest.mark.parametrize(
    "other",
    [
        {"args": scaled_args(n=255)},
        {"args": scaled_args(stride=2)},
        {"args": scaled_args(n=1 << 40)},
        {"args": scaled_args(x=torch.zeros(256, dtype=torch.bfloat16))},
        {"args": scaled_args(x=torch.zeros(257)[1:])},
        {"args": scaled_args(bias=torch.zeros(1))},
        {"constants": (512,)},
        {"num_warps": 8},
        {"enable_fp_fusion": False},
        {"arch": "sm_100"},
    ],
    ids=str,
)
def test_every_specialisation_is_a_request_of_its_own(tmp_path, other):
    fn = load(tmp_path).kernel
    assert key(fn, scaled_args()).request != key(fn, **{"args": scaled_args(), **other}).request


def test_values_that_triton_does_not_specialise_on_share_a_request(tmp_path):
    fn = load(tmp_path).kernel
    assert key(fn, scaled_args()) == key(fn, scaled_args(n=4096, factor=3.0))


def test_fake_tensors_ask_for_what_aligned_ones_ask_for(tmp_path):
    fn = load(tmp_path).kernel
    meta = scaled_args(x=torch.zeros(256, device="meta"), y=torch.zeros(256, device="meta"))
    assert key(fn, triton_compile.aligned(meta)) == key(fn, scaled_args())


def test_an_unknown_target_is_named():
    with pytest.raises(BackendError, match="x86-64"):
        TritonKernel(harness.row_sum_kernel).compile("x86-64", ARGS, (1024,), num_warps=4)


# --------------------------------------------------------------------------------------------------- what is compiled


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_it_compiles_for_a_gpu_that_is_not_here(arch, kernels):
    made = TritonKernel(harness.row_sum_kernel).compile(arch, ARGS, (1024,), num_warps=4)
    assert made.binary[:4] == b"\x7fELF"
    assert made.info["symbol"] == "row_sum_kernel"
    assert made.info["registers"] > 0
    assert made.info["spills"] == 0
    assert made.path.parent.parent == kernels


def test_spills_are_told(kernels):
    x = torch.zeros(64 * 1024)
    made = TritonKernel(harness.many_live_values_kernel).compile("sm_90", (x, x), (1024, 64), num_warps=1)
    assert made.info["spills"] > 0


def test_the_abi_is_told(tmp_path, kernels):
    """None and integers equal to 1 become constants; two scratch pointers follow."""
    made = TritonKernel(load(tmp_path).kernel).compile("sm_90", scaled_args(n=1 << 40), (256,), num_warps=2)
    assert made.info["parameters"] == ["x", "y", "n", "factor"]
    assert made.info["signature"] == "PPqfPP"
    assert made.info["num_warps"] == 2


DESCRIPTORS = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, y, M, N, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BLOCK, BLOCK])
    target.store([0, 0], source.load([0, 0]))
"""


def test_a_kernel_that_only_tritons_launcher_serves_is_refused(tmp_path, kernels):
    kernel = TritonKernel(load(tmp_path).kernel, launch_cooperative_grid=True)
    with pytest.raises(BackendError, match="launch_cooperative_grid=True, which only Triton's own launcher serves"):
        kernel.compile("sm_90", scaled_args(), (256,), num_warps=4)


def test_collecting_leaves_one_job_a_specialisation(kernels):
    kernel = TritonKernel(harness.row_sum_kernel)
    meta = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in ARGS)
    with collect("sm_90a") as collector:
        for rows in (8, 16):
            kernel((rows,), meta, (1024,), num_warps=4)
        kernel((8,), meta, (512,), num_warps=4)
    assert [job.name for job in collector.jobs] == ["row_sum_kernel"] * 2
    assert list(cache.entries()) == []
    assert collector.jobs[0].compile().key.arch == "sm_90"


# --------------------------------------------------------------------------------------------------- how it is launched


class Launch:
    """Stands in for the driver's."""

    def __init__(self, loaded, signature, *, block, shared_bytes, dependent):
        self.loaded, self.signature, self.block, self.shared_bytes = loaded, signature, block, shared_bytes
        self.dependent = dependent


@pytest.fixture
def prepare(monkeypatch, kernels):
    """(args, constants, kernel) -> what is launched on an H200; raises Compiled where Triton would compile."""

    def compiles(self, *args, **options):
        raise Compiled

    monkeypatch.setattr(triton_launch, "arch", lambda device: "sm_90")
    monkeypatch.setattr(triton_launch.driver, "Launch", Launch)
    monkeypatch.setattr(triton_launch.driver, "load", lambda binary, device, symbol: (binary, device, symbol))
    monkeypatch.setattr(triton_launch.JITFunction, "run", compiles)
    return lambda kernel, args, constants: kernel._prepare(0, (8,), args, constants, 4, 1)


class Compiled(Exception):
    """Triton's own compiler was called."""


def test_what_was_compiled_elsewhere_is_launched_without_triton(tmp_path, prepare):
    kernel = TritonKernel(load(tmp_path).kernel)
    made = kernel.compile("sm_90", scaled_args(), (256,), num_warps=4)
    ready = prepare(TritonKernel(load(tmp_path).kernel), scaled_args(), (256,))
    assert ready.launch.loaded == (made.binary, 0, "kernel")
    assert (ready.launch.signature, ready.launch.block) == ("PPifPP", (128, 1, 1))
    x, y, bias, n, stride, factor = scaled_args()
    assert ready.parameters((x, y, bias, n, stride, factor, 256), 8, x.device) == (x, y, n, factor, 0, 0)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_start_beside_the_kernel_before_is_kept(tmp_path, prepare, dependent):
    kernel = TritonKernel(load(tmp_path).kernel, launch_pdl=dependent)
    kernel.compile("sm_90", scaled_args(), (256,), num_warps=4)
    assert prepare(kernel, scaled_args(), (256,)).launch.dependent is dependent


def test_descriptors_that_programs_make_get_memory_that_a_tape_repeats(tmp_path, prepare):
    """Two tensor maps of 128 bytes for each program."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    args = (x, x, 64, 64)
    kernel = TritonKernel(load(tmp_path, DESCRIPTORS).kernel)
    kernel.compile("sm_90", args, (64,), num_warps=4)
    ready = prepare(kernel, args, (64,))
    assert ready.scratch_bytes >= 256
    with listen() as tape:
        *_, memory, profile = ready.parameters((*args, 64), 8, x.device)
    assert (memory.numel(), profile) == (8 * ready.scratch_bytes, 0)
    assert tape._scratch == [memory]


def test_what_was_not_is_left_to_triton(tmp_path, prepare):
    kernel = TritonKernel(load(tmp_path).kernel)
    kernel.compile("sm_90", scaled_args(), (256,), num_warps=4)
    for args, constants in ((scaled_args(n=255), (256,)), (scaled_args(), (512,))):
        with pytest.raises(Compiled):
            prepare(kernel, args, constants)


@pytest.mark.parametrize("switch", ["debug", "rebuild", "no_launcher"])
def test_the_cache_is_passed_by_when_asked_to_compile_otherwise(switch, tmp_path, prepare, monkeypatch):
    kernel = TritonKernel(load(tmp_path).kernel)
    kernel.compile("sm_90", scaled_args(), (256,), num_warps=4)
    if switch == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif switch == "rebuild":
        monkeypatch.setenv("TILEWRIGHT_JIT_REBUILD", "1")
        settings.reload()
    else:
        monkeypatch.setattr(triton_launch, "_launchable", lambda: False)
    with pytest.raises(Compiled):
        prepare(kernel, scaled_args(), (256,))


def test_where_nothing_can_launch_them_cached_kernels_are_not_looked_for(monkeypatch):
    assert triton_launch._launchable.__wrapped__()
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: None)
    assert not triton_launch._launchable.__wrapped__()


def test_one_switch_brings_every_kernel_to_our_launcher(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(triton_launch, "OWN_LAUNCHER", True)
    ready = prepare(TritonKernel(load(tmp_path).kernel), scaled_args(), (256,))
    assert isinstance(ready.launch, Launch)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["bundle", "own_launcher"])
def test_it_computes_the_same_without_any_compiler(own, kernels, monkeypatch):
    from tilewright.hardware import arch
    from tilewright.jit.tape import listen

    x = torch.randn(8, 4096, dtype=torch.bfloat16, device="cuda")
    first, second = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    kernel = TritonKernel(harness.row_sum_kernel)
    monkeypatch.setattr(triton_launch, "OWN_LAUNCHER", own)
    if not own:
        kernel.compile(arch("cuda"), (x, first, 4096), (1024,), num_warps=4)
        cache.forget()
        monkeypatch.setattr(triton_compile.triton, "compile", None)
        monkeypatch.setattr(triton_launch.JITFunction, "run", None)
    with listen() as taping:
        kernel((8,), (x, first, 4096), (1024,), num_warps=4)
    tape = taping.finish((x, first))
    tape.replay(x.device.index, [x.data_ptr(), second.data_ptr()])
    expected = x.float().sum(1)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(first, second)


# ---------------------------------------------------------------------------------------------- threads and devices


@pytest.fixture
def gpu(monkeypatch):
    """Triton compiles for an H200 that is not here; yields what it loads and launches, loading slowly."""
    events = []

    class Utils(fake_driver._Utils):
        def load_binary(self, name, blob, shared, device):
            time.sleep(0.2)
            events.append(("load", device))
            return 1, 4096 + device, 0, 0, fake_driver.MAX_THREADS

    class Launcher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False

        def __init__(self, src, metadata):
            self.launch = lambda x, y, z, stream, function, *rest: events.append(("launch", stream, function))

        def __call__(self, x, y, z, stream, function, *rest):
            events.append(("shell", function))

    where = threading.local()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(where, "index", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: Inside(where, index))
    monkeypatch.setattr(triton_launch, "_current_stream", lambda index: 1000 + index)
    monkeypatch.setattr(triton_launch, "_launchable", lambda: False)
    with fake_driver.target("sm_90"):
        active = triton.runtime.driver.active
        active.utils, active.launcher_cls = Utils("sm_90"), Launcher
        active.get_current_device = torch.cuda.current_device
        yield events


class Inside:
    """In the place of `torch.cuda.device`."""

    def __init__(self, where, index):
        self.where, self.index = where, index

    def __enter__(self):
        self.before, self.where.index = torch.cuda.current_device(), self.index

    def __exit__(self, *_):
        self.where.index = self.before


class OnGpu(torch.Tensor):
    """A tensor that says which GPU it is on, and has an address."""

    @staticmethod
    def at(index):
        made = torch.zeros(256).as_subclass(OnGpu)
        made.index = index
        return made

    device = property(lambda self: torch.device("cuda", self.index))


def test_threads_that_are_first_together_launch_what_is_loaded(tmp_path, gpu):
    """Triton shows a launcher before the function behind it is loaded."""
    kernel, together = TritonKernel(load(tmp_path).kernel), threading.Barrier(4)
    args = scaled_args(x=OnGpu.at(0), y=OnGpu.at(0))

    def work(_):
        together.wait(timeout=60)
        kernel((8,), args, (256,), num_warps=4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert gpu.count(("launch", 1000, 4096)) == 4
    assert gpu.count(("load", 0)) == 1


@pytest.mark.parametrize("hooked", [False, True])
def test_a_tensor_of_another_device_is_launched_there(tmp_path, gpu, monkeypatch, hooked):
    kernel = TritonKernel(load(tmp_path).kernel)
    monkeypatch.setattr(triton_launch, "_hooked", lambda: hooked)
    for index in (0, 1):
        kernel((8,), scaled_args(x=OnGpu.at(index), y=OnGpu.at(index)), (256,), num_warps=4)
    assert [event for event in gpu if event[0] == "load"] == [("load", 0), ("load", 1)]
    assert [event[-1] for event in gpu if event[0] != "load"] == [4096, 4097]


def test_integers_of_more_than_32_bits_of_either_sign_are_a_specialisation_of_their_own():
    special = triton_launch._specialise
    for near, far in ((2**31 - 16, 2**31), (-(2**31), -(2**31) - 16), (-(2**31) + 1, -(2**31) - 1)):
        assert special(near) != special(far)
