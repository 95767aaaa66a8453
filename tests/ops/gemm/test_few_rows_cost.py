"""The cost model of few rows is the fit to the committed times, and chooses well on shapes held out of it."""

import sys
from pathlib import Path

import pytest

from tilewright.ops.gemm.dense.args import BmmBucket, MatmulBucket
from tilewright.ops.gemm.kernels.sm90 import few_rows, few_rows_cost

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def fitting():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fit_few_rows
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fit_few_rows


@pytest.fixture(scope="module")
def measured(fitting):
    return fitting.read(BENCHMARKS / "results" / "h200" / "product_costs.json")


def test_the_factors_are_those_of_the_fit(fitting, measured):
    rows, _ = measured
    fit = few_rows_cost.Terms(*fitting.fit(rows))
    assert pytest.approx(fit, rel=0.01) == few_rows_cost.US


def test_held_out_shapes(fitting, measured):
    rows, cublas = measured
    losses, gains = fitting.choices(rows, fitting.held_out(rows), cublas)
    assert fitting.mean(losses) < 1.03
    assert fitting.mean(gains) > 1.1


def test_what_configure_chooses_is_near_the_best_measured_config(fitting, measured):
    rows, _ = measured
    us = {(row.product, row.config): row.us for row in rows}
    losses = []
    for m, n, k in {row.product for row in rows}:
        config = few_rows.configure(MatmulBucket(m, n, k, layout=0, aligned=1, out_bits=16, epilogue=0), None)
        losses.append(us[(m, n, k), config] / min(row.us for row in rows if row.product == (m, n, k)))
    assert fitting.mean(losses) < 1.03


def test_a_batch_counts_its_tiles():
    single = MatmulBucket(8, 512, 4096, layout=0, aligned=1, out_bits=16, epilogue=0)
    batch = BmmBucket(64, 8, 512, 4096, layout=0, aligned=1, out_bits=16, epilogue=0)
    assert few_rows.configure(single, None).split > few_rows.configure(batch, None).split
