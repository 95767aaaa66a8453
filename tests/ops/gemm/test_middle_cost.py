"""The cost model of 65 to 512 rows beside committed times: near them, and its choices near the best.

The times have no split of K, and those of tiles that are not full are older than boxes that end with the rows of A.
"""

import math
import sys
from pathlib import Path

import pytest

from tilewright.ops.gemm.kernels.sm90 import middle_cost
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def fitting():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fit_middle
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fit_middle


@pytest.fixture(scope="module")
def rows(fitting):
    return fitting.read([BENCHMARKS / "results" / "h200" / "product_costs.json"], "sm90.dense")[0]


def predictions(rows):
    return [middle_cost.predicted_us(Problem(*row.shape), row.tile) for row in rows]


def test_predictions_are_near_the_times(rows):
    assert len(rows) > 250
    errors = [abs(math.log(us / row.us)) for us, row in zip(predictions(rows), rows, strict=True)]
    assert sum(errors) / len(errors) < 0.07


def test_choices_are_near_the_best(fitting, rows):
    losses = [chosen.us / best.us for chosen, best in fitting.choices(rows, predictions(rows))]
    assert fitting.mean(losses) < 1.02


def test_the_script_predicts_what_the_module_does(fitting, rows):
    factors = fitting.torch.tensor(middle_cost.US, dtype=fitting.torch.float64)
    found = fitting.predicted(fitting.terms_of(rows, 2), factors).tolist()
    assert found == pytest.approx(predictions(rows))
