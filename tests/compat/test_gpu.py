"""DeepGEMM's names on a GPU: programs, the multiprocessor budget, and the timing tools."""

import pytest
import torch
from tests.compat.test_deep_gemm import PROGRAMS, run_program

from tilewright import ops
from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm.testing import bench, bench_kineto, calc_diff
from tilewright.dispatch import use_backend
from tilewright.dispatch.backends import missing
from tilewright.errors import KernelMissingError

pytestmark = pytest.mark.gpu


@pytest.fixture
def all_sms():
    yield deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(0)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, k, device="cuda", generator=g).bfloat16() for rows in (m, n))
    return a, b, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
def test_a_program_written_for_deep_gemm_runs(program, tmp_path, capfd, all_sms):
    run_program(program, tmp_path)
    assert " us, " in capfd.readouterr().out
    assert deep_gemm.get_num_sms() == all_sms == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
def test_a_budget_slows_a_persistent_kernel_down_and_ends(backend, all_sms):
    """An eighth of the machine takes longer by more than three; the tape of the calls before does not outlive it."""
    reason = missing(backend, "cuda")
    if reason is not None:
        pytest.skip(reason)
    a, b, d = operands(2048, 2048, 2048)
    reference = a.float() @ b.float().T
    try:
        ops.matmul(a, b, trans_b=True, backend=backend)  # a demand; the preference below would fall back
    except KernelMissingError as error:
        pytest.skip(str(error))

    def seconds() -> float:
        d.fill_(float("nan"))
        taken = bench_kineto(lambda: deep_gemm.bf16_gemm_nt(a, b, d), "bf16_gemm", num_tests=10)
        assert calc_diff(d, reference) < 1e-5
        return taken

    with use_backend(backend):
        whole = seconds()
        deep_gemm.set_num_sms(all_sms // 16 * 2)
        part = seconds()
        deep_gemm.set_num_sms(0)
        again = seconds()
    assert part > 3 * whole
    assert again < 1.5 * whole


@pytest.mark.parametrize("sizes", [(128, 512, 128), (8, 4096, 1024)], ids=["many heads", "few heads"])
@pytest.mark.parametrize("b", [4, 32, 128, 4096])
@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr"])
def test_batches_are_what_torchs_einsum_makes(expr, b, sizes):
    """DeepGEMM's tests compare them within 1e-10: hardly an element may be rounded another way."""
    size = dict(zip("hrd", sizes, strict=True), b=b)
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn([size[letter] for letter in expr[:3]], device="cuda", generator=g).bfloat16()
    w = torch.randn(size["h"], size["d"], size["r"] + 128, device="cuda", generator=g).bfloat16()[..., : size["r"]]
    z = torch.empty([size[letter] for letter in expr[-3:]], device="cuda", dtype=torch.bfloat16)
    deep_gemm.einsum(expr, x, w, z)
    assert calc_diff(z, torch.einsum(expr, x, w)) < 1e-10
    assert bench_kineto(lambda: deep_gemm.einsum(expr, x, w, z), "gemm") > 0  # whatever the kernels are called


@pytest.mark.parametrize("psum", [False, True], ids=["ids", "ends"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_padding_of_zeros_gives_zeros(kind, psum):
    """Rows between groups of a result that comes uninitialised, captured in a graph too."""
    sizes, n, k = [900, 0, 1300, 1], 512, 1024
    whole = [deep_gemm.align(rows, 128) for rows in sizes]
    g = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(sum(whole), k, device="cuda", generator=g).bfloat16()
    b = torch.randn(len(sizes), n, k, device="cuda", generator=g).bfloat16()
    ids = torch.full((sum(whole),), -1, dtype=torch.int32)
    ends, exact, at = [], torch.zeros(sum(whole), n, device="cuda"), 0
    for group, (rows, length) in enumerate(zip(sizes, whole, strict=True)):
        ids[at : at + rows] = group
        exact[at : at + rows] = a[at : at + rows].float() @ b[group].float().T
        ends.append(at + rows)
        at += length
    a[(ids == -1).cuda()] = 0
    layout = torch.tensor(ends, dtype=torch.int32, device="cuda") if psum else ids.cuda()
    left, right = a, b
    if kind == "fp8":
        left = deep_gemm.per_token_cast_to_fp8(a, use_ue8m0=False)
        pairs = [deep_gemm.per_block_cast_to_fp8(each, use_ue8m0=False) for each in b]
        data = torch.stack([q.view(torch.uint8) for q, _ in pairs]).view(torch.float8_e4m3fn)
        right = data, torch.stack([scales for _, scales in pairs])
    d = torch.full((sum(whole), n), float("nan"), device="cuda", dtype=torch.bfloat16)
    call = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
    call(left, right, d, layout, use_psum_layout=psum)
    limit = 1e-5 if kind == "bf16" else 1e-3
    assert calc_diff(d, exact) < limit
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(left, right, d, layout, use_psum_layout=psum)
    d.fill_(float("nan"))
    graph.replay()
    assert calc_diff(d, exact) < limit


@pytest.mark.parametrize("odd", [1, 131])
def test_odd_numbers_of_multiprocessors(odd, all_sms):
    a, b, d = operands(512, 1024, 512)
    deep_gemm.set_num_sms(min(odd, all_sms))
    for backend in (None, "cuda", "triton"):
        with use_backend(backend or "auto"):
            d.fill_(float("nan"))
            deep_gemm.bf16_gemm_nt(a, b, d)
        assert calc_diff(d, a.float() @ b.float().T) < 1e-5, backend


@pytest.mark.parametrize("m", [8, 4096])
def test_a_sum_of_nothing_in_wider_tensors(m):
    """Rows of 16 bytes and no columns: the op, and both forms of this module."""
    a, b = torch.ones(m, 64, device="cuda").bfloat16()[:, :0], torch.ones(256, 64, device="cuda").bfloat16()[:, :0]
    assert (ops.matmul(a, b, trans_b=True) == 0).all()
    scales = torch.ones(m, 1, device="cuda")[:, :0], torch.ones(2, 1, device="cuda")[:, :0]
    pairs = (a.to(torch.float8_e4m3fn), scales[0]), (b.to(torch.float8_e4m3fn), scales[1])
    for call, given in ((deep_gemm.bf16_gemm_nt, (a, b)), (deep_gemm.fp8_gemm_nt, pairs)):
        d = torch.full((m, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
        call(*given, d)
        assert (d == 0).all()


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_torchs_own_product(layout, dtype):
    a, b, _ = operands(512, 768, 1024)
    exact = a.float() @ b.float().T
    d = torch.empty(512, 768, device="cuda", dtype=dtype)
    left, right = (a.T.contiguous() if layout[0] == "t" else a), (b if layout[1] == "t" else b.T.contiguous())
    getattr(deep_gemm, f"cublaslt_gemm_{layout}")(left, right, d)
    assert calc_diff(d, exact.to(dtype)) < 6e-7


def test_kineto_leaves_the_flush_out():
    """A product of 2 GFLOP takes microseconds; overwriting four times the L2 would add a hundred."""
    a, b, d = operands(1024, 1024, 1024)

    def call():
        torch.exp(d, out=d)
        deep_gemm.bf16_gemm_nt(a, b, d)

    whole, exp = bench_kineto(call, ("bf16_gemm", "exp_kernel"), num_tests=10)
    assert 0 < exp < whole < 50e-6


def test_events_and_the_profiler_agree_on_a_long_call():
    a, b, d = operands(8192, 8192, 4096)

    def call():
        deep_gemm.bf16_gemm_nt(a, b, d)

    assert bench(call, high_precision=True) == pytest.approx(bench_kineto(call, "bf16_gemm"), rel=0.3)
