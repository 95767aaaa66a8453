"""DeepGEMM's names on a GPU: programs, the multiprocessor budget, and the timing tools."""

import pytest
import torch
from tests.compat.test_deep_gemm import PROGRAMS, run_program

from tilewright import ops
from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm.testing import bench, bench_kineto, calc_diff
from tilewright.dispatch import use_backend
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
    a, b, d = operands(2048, 2048, 2048)
    reference = a.float() @ b.float().T
    try:
        ops.matmul(a, b, trans_b=True, backend=backend)  # a demand; the preference below would fall back
    except KernelMissingError as missing:
        pytest.skip(str(missing))

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
