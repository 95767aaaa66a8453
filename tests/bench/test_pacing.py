"""What is timed as a graph, of how many launches, and how many rounds a timing may take."""

import pytest
import torch

from tilewright.bench import matrix
from tilewright.bench.graph import MIN_LAUNCHES
from tilewright.bench.pacing import GRAPH_BELOW_US, LAUNCH_SIZED_BYTES, MAX_LAUNCHES, graph_launches
from tilewright.bench.statistics import Samples
from tilewright.bench.timing import Plan, _affordable

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("inference", [True, False])
def test_what_is_launch_sized_is_always_timed_as_a_graph(inference: bool) -> None:
    assert graph_launches(LAUNCH_SIZED_BYTES, 2.0, GPU, inference=inference) == MAX_LAUNCHES


@pytest.mark.parametrize(
    ("predicted_us", "launches"),
    [(3.5, 115), (7.0, 58), (15.0, 27), (39.0, MIN_LAUNCHES), (GRAPH_BELOW_US, None), (400.0, None)],
)
def test_short_work_of_inference_is_timed_as_a_graph_that_fills_a_sample(
    predicted_us: float, launches: int | None
) -> None:
    assert graph_launches(30_000_000, predicted_us, GPU, inference=True) == launches


def test_work_with_a_backward_beyond_the_launch_size_and_work_of_a_cpu_are_timed_call_by_call() -> None:
    assert graph_launches(30_000_000, 7.0, GPU, inference=False) is None
    assert graph_launches(1000, 0.1, CPU, inference=True) is None


@pytest.mark.parametrize(
    ("sample_us", "pause_s", "rounds"),
    [
        (1000.0, 0.0, 25),  # 25 rounds of 2 ms
        (100_000.0, 0.0, 10),  # 200 ms each, 2 s in all
        (5_000_000.0, 0.0, 5),  # never fewer
        (1000.0, 0.1, 9),  # the pauses count
    ],
)
def test_rounds_that_take_too_long_are_cut_to_no_fewer_than_five(sample_us: float, pause_s: float, rounds: int) -> None:
    plans = [Plan(lambda: None, 1, 0.0, us=sample_us)] * 2
    assert _affordable(plans, 25, 2.0, pause_s) == rounds
    assert _affordable(plans, 3, 2.0, pause_s) == 3


def test_the_matrix_rate_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ((8, 8, 8), (16, 16, 16))
    monkeypatch.setattr(matrix, "_CPU_SIZES", sizes)
    us = iter((4.0, 2.0))
    monkeypatch.setattr(matrix, "interleave", lambda calls, **options: {name: Samples([next(us)]) for name in calls})
    assert matrix.matrix_rate(torch.float32, CPU) == 2 * 16**3 / 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_matrix_rate_of_this_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_CPU_SIZES", ((64, 64, 64),))
    assert 1 < matrix.matrix_rate(dtype, CPU) < 1e8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_matrix_rate_of_a_gpu(dtype: torch.dtype) -> None:
    assert matrix.matrix_rate(dtype, GPU) > 1e6
