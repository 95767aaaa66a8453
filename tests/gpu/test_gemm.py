"""Dense products on a GPU: every backend within the bounds of each tile, the same bits always, in graphs, on streams.

`tests/ops/gemm` runs options and views on the same backends; here is what takes a device, and sizes of real layers.
"""

import pytest
import torch
from tests.ops.gemm.bounds import KERNELS, check, exact, faults, operands, run

from tilewright import ops
from tilewright.dispatch import contract, numerics, record
from tilewright.dispatch.backends import missing
from tilewright.errors import BackendError
from tilewright.ops.gemm.operands import LAYOUTS
from tilewright.validate import check as validate
from tilewright.validate.bits import same_bits

pytestmark = pytest.mark.gpu

HALF = torch.bfloat16
NO_KERNEL = "is not in the kernel cache"
SIZES = [
    (1, 2112, 7168),
    (8, 576, 7168),
    (16, 4096, 2048),
    (33, 1000, 520),
    (64, 24576, 1536),
    (65, 7168, 2048),
    (127, 2112, 7168),
    (512, 512, 512),
    (300, 520, 1032),
    (1000, 4104, 512),
    (4096, 1024, 4096),
]


def skip_without_compiler(words):
    """A machine may have a backend's launcher and not its compiler, nor a bundle with this very kernel."""
    if NO_KERNEL in words:
        pytest.skip(words)


on_every_kernel = pytest.mark.parametrize("place", KERNELS, ids=str)


@on_every_kernel
def test_aligned_halves_are_refused_by_no_kernel(place):
    """Skips elsewhere stand for refusals; here one is a failure, unless the machine lacks the backend."""
    reason = missing(place.backend, "cuda")
    if reason is not None:
        pytest.skip(reason)
    for m in (1, 64, 65, 1024):
        for layout in LAYOUTS:
            a, b = operands(m if layout[0] == "n" else -(-m // 8) * 8, 512, 512, layout, HALF, "cuda")
            try:
                products = ops.matmul(a, b, backend=place.backend), ops.bmm(a[None], b[None], backend=place.backend)[0]
            except BackendError as error:
                skip_without_compiler(str(error))
                raise
            for product in products:
                check(product, a, b)


@on_every_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_every_tile(size, layout, place):
    a, b = operands(*size, layout, HALF, "cuda")
    check(run(ops.matmul, a, b, place=place), a, b)
    check(run(ops.matmul, a, b, place=place, out_dtype=torch.float32), a, b)


@on_every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, place):
    for m in (4, 200):
        a, b = operands(m, 776, 1032, "nt", dtype, "cuda")
        check(run(ops.matmul, a, b, place=place), a, b)


@on_every_kernel
@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_every_epilogue(activation, m, place):
    n, k = 1040, 776
    a, b = operands(m, n, k, "nt", HALF, "cuda")
    n_out = n // 2 if activation == "swiglu" else n
    bias = torch.randn(n, device="cuda", dtype=HALF)
    for c_dtype, out_dtype in ((None, HALF), (HALF, HALF), (torch.float32, torch.float32), (HALF, torch.float32)):
        c = None if c_dtype is None else torch.randn(m, n_out, device="cuda").to(c_dtype)
        for scale in (0.5, torch.tensor([0.5], device="cuda")):
            options = {"bias": bias, "activation": activation, "c": c, "alpha": scale}
            check(run(ops.matmul, a, b, place=place, out_dtype=out_dtype, **options), a, b, **options)


@on_every_kernel
@pytest.mark.parametrize("name", ["matmul", "bmm"])
def test_edge_cases_in_every_mode(name, place):
    modes = ["eager", "backward", "poison", "out", "inputs_unchanged", "determinism", "cuda_graph", "side_stream"]
    modes += ["batch_invariance", "guard_bands"]
    subject = contract(name)
    ran = 0
    for workload in subject.edge_cases:
        sample = subject.inputs(workload.params, HALF, torch.device("cuda"), 0)
        plan = subject.forward.plan(raw_args(subject, sample), place.backend, "default")
        if plan.backend != place.backend:  # refused, and said why; a preference falls back
            continue
        report = validate(name, workload, modes=modes, backend=place.backend, dtype=HALF, device="cuda")
        if not report.failures:
            skip_without_compiler(str(report))
        report.require()
        ran += 1
    if missing(place.backend, "cuda") is None:
        assert ran >= 10


def raw_args(subject, sample):
    with torch.no_grad(), record() as notes:
        subject.function(*sample.args, **sample.kwargs, backend="torch")
    return notes.calls[0][1]


# The same bits, in every batch.  `test_repeats.py` has repeats.


@on_every_kernel
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 7168), (4104, 1032)])
def test_a_row_is_the_same_in_every_batch(n, k, place):
    a, b = operands(4096, n, k, "nt", HALF, "cuda")
    bias = torch.randn(n, device="cuda", dtype=HALF)
    with numerics("batch_invariant"):
        whole = run(ops.matmul, a, b, place=place, bias=bias)
        for m in (1, 2, 16, 63, 64, 65, 1000):
            for start in (0, 1234, 4096 - m):
                part = run(ops.matmul, a[start : start + m], b, place=place, bias=bias)
                assert same_bits(part, whole[start : start + m]), f"rows {start} to {start + m - 1}"
        plan = contract("matmul").forward.plan((a[:1], b, bias, None, None, 1.0, "", HALF), "auto", "batch_invariant")
    assert plan.bucket.startswith("M=4096,")


# Graphs, streams, devices, tapes.


@on_every_kernel
@pytest.mark.parametrize("m", [1, 16, 64, 200, 1024])
def test_a_graph_replays_on_new_values(m, place):
    a, b = operands(m, 1032, 2048, "nt", HALF, "cuda")
    total = torch.zeros(m, 1032, device="cuda")
    run(ops.matmul, a, b, place=place, c=total, out=total, out_dtype=torch.float32)  # compiles
    total.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ops.matmul(a, b, backend=place.backend)
        ops.matmul(a, b, c=total, out=total, out_dtype=torch.float32, backend=place.backend)
    wanted = torch.zeros(m, 1032, device="cuda", dtype=torch.float64)
    for _ in range(3):
        other_a, other_b = operands(m, 1032, 2048, "nt", HALF, "cuda")
        a.copy_(other_a), b.copy_(other_b)
        graph.replay()
        check(made, a, b)
        wanted += exact(a, b)[0]
    assert faults(total, wanted, 3 * exact(a, b)[1] + 2**-22 * wanted.abs() + 2**-18) == []


@on_every_kernel
def test_two_streams_at_once(place):
    """Each stream has its own problem, and its own workspace if there is one."""
    problems = [operands(m, 2112, 7168, "nt", HALF, "cuda") for m in (8, 64)]
    wanted = [run(ops.matmul, a, b, place=place) for a, b in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    made = [[], []]
    for _ in range(50):
        for i, (a, b) in enumerate(problems):
            with torch.cuda.stream(streams[i]):
                made[i].append(ops.matmul(a, b, backend=place.backend))
    torch.cuda.synchronize()
    for results, expected in zip(made, wanted, strict=True):
        assert all(same_bits(result, expected) for result in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@on_every_kernel
def test_two_devices(place):
    for index in (0, 1, 0, 1):
        device = f"cuda:{index}"
        for m in (8, 300):
            a, b = operands(m, 520, 1032, "nt", HALF, device)
            made = run(ops.matmul, a, b, place=place)
            assert made.device == a.device
            check(made, a, b)


@on_every_kernel
@pytest.mark.parametrize("m", [1, 64, 256])
def test_a_second_call_is_a_replay(m, place):
    if place.backend == "triton":
        pytest.skip("its descriptors lie in memory that Triton allocates at each launch: no tape")
    raw = contract("matmul").forward
    raw.forget_plans()
    for _ in range(3):
        a, b = operands(m, 520, 1032, "nt", HALF, "cuda")
        out = torch.empty(m, 520, device="cuda", dtype=HALF)
        with torch.no_grad():
            check(run(ops.matmul, a, b, place=place), a, b)
            check(run(ops.matmul, a, b, place=place, out=out), a, b)
    assert len(raw.entries) == 2
    assert all(entry is not None for entry in raw.entries.values())


# Beyond 2**31 elements.


@on_every_kernel
def test_a_result_of_more_than_two_billion_elements(place):
    m, n, k = 70000, 32768, 64
    a, b = operands(m, n, k, "nt", HALF, "cuda")
    made = run(ops.matmul, a, b, place=place)
    for rows in (slice(0, 128), slice(65500, 65628), slice(m - 128, m)):
        check(made[rows], a[rows], b)


@on_every_kernel
def test_weights_of_more_than_two_billion_elements(place):
    m, n, k = 4, 1 << 22, 520
    weight = torch.empty(n, k, device="cuda", dtype=HALF).normal_(std=k**-0.5)
    a = torch.randn(m, k, device="cuda").to(HALF)
    made = run(ops.matmul, a, weight, place=place, trans_b=True)
    for columns in (slice(0, 4096), slice(n - 4096, n)):
        check(made[:, columns], a, weight[columns].mT)
