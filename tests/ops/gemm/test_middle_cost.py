"""The cost model of 65 to 512 rows beside committed times: near them, and its choices near the best.

`middle_costs.json` has tiles with and without a split of K; `product_costs.json` has more shapes, without a split, and
its times of tiles that are not full are older than boxes that end with the rows of A.

Bounds: the mean error of a fit to other shapes is 6.8 % and 5.2 %.  Worst is (64, 4608, 3584), where the tile of 64
columns takes 14.1 us and that of 96 takes 11.5.
"""

import math
import sys
from pathlib import Path

import pytest

from tilewright.ops.gemm.kernels.sm90 import dense, fp8, fp8_cost_model, middle_cost
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KERNELS = {"sm90.dense": 2, "sm90.fp8": 1}  # bytes of an operand


@pytest.fixture(scope="module")
def fitting():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fit_middle
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fit_middle


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return request.param


@pytest.fixture(scope="module")
def rows(fitting, kernel):
    files = [BENCHMARKS / "results" / "h200" / name for name in ("middle_costs.json", "product_costs.json")]
    return fitting.read(files, kernel)[0]


def predictions(rows, itemsize):
    return [middle_cost.predicted_us(Problem(*row.shape, itemsize=itemsize), row.tile) for row in rows]


def test_predictions_are_near_the_times(rows, kernel):
    assert len(rows) > 1000
    errors = [abs(math.log(us / row.us)) for us, row in zip(predictions(rows, KERNELS[kernel]), rows, strict=True)]
    assert sum(errors) / len(errors) < {"sm90.dense": 0.07, "sm90.fp8": 0.055}[kernel]


def test_choices_are_near_the_best(fitting, rows, kernel):
    losses = [chosen.us / best.us for chosen, best in fitting.choices(rows, predictions(rows, KERNELS[kernel]))]
    assert fitting.mean(losses) < {"sm90.dense": 1.02, "sm90.fp8": 1.01}[kernel]
    assert sorted(losses)[len(losses) // 2] == 1
    assert max(losses) < 1.25


def test_kernels_choose_what_is_measured(rows, kernel):
    """The bounds above say little if tiles that were not timed are predicted to be best."""
    measured = {(row.shape, row.tile) for row in rows if row.shape[1:] in SPLIT_LAYERS and row.shape[0] >= 96}
    ranked = {
        "sm90.dense": lambda shape: dense.rank_middle(Problem(*shape, sms=132)),
        "sm90.fp8": lambda shape: fp8.rank_middle(fp8_cost_model.Problem(*shape, sms=132)),
    }[kernel]
    shapes = {shape for shape, _ in measured}
    found = sum((shape, ranked(shape)[0]) in measured for shape in shapes)
    assert len(shapes) == 72
    assert found >= 70


SPLIT_LAYERS = {
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),
    (2112, 7168), (576, 7168), (7168, 16384), (7168, 2048),
}  # fmt: skip


def test_a_cluster_must_promise_the_margin():
    plain = Tile(128, 128)
    for tile in (Tile(128, 128, 2), Tile(128, 128, 1, 2), Tile(128, 128, split=2)):
        assert middle_cost.preference(95.0, tile) > middle_cost.preference(100.0, plain)
        assert middle_cost.preference(90.0, tile) < middle_cost.preference(100.0, plain)


def test_the_script_predicts_what_the_module_does(fitting, rows, kernel):
    factors = middle_cost.US if kernel == "sm90.dense" else middle_cost.US_8_BIT
    factors = fitting.torch.tensor(factors, dtype=fitting.torch.float64)
    found = fitting.predicted(fitting.terms_of(rows, KERNELS[kernel]), factors).tolist()
    assert found == pytest.approx(predictions(rows, KERNELS[kernel]))
