"""Fit the cost model of sm90.few_rows to measured times, and judge it on layer shapes held out of the fit.

    python benchmarks/fit_few_rows.py [--json benchmarks/results/h200/product_costs.json]

Prints the factors of `few_rows_cost.US`; of five fits, each without a fifth of the shapes (N, K), the mean error of the
held-out predictions; and what a choice costs: the time of the config that a fit prefers over that of the best config,
and cuBLAS's time over it.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.gemm.kernels.sm90 import few_rows_cost, few_rows_model
from tilewright.ops.gemm.kernels.sm90.few_rows_model import UNSCALED, Config, Work

Product = tuple[int, int, int]
FOLDS = 5


class Row(NamedTuple):
    """One measured time."""

    product: Product
    config: Config
    us: float


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/h200/product_costs.json"))
    rows, cublas = read(parser.parse_args().json)
    factors = fit(rows)
    print(f"{len(rows)} times of {len({row.product for row in rows})} products")
    print(few_rows_cost.Terms(*(float(f"{factor:.3g}") for factor in factors)))
    predictions = held_out(rows)
    errors = [abs(math.log(us / row.us)) for us, row in zip(predictions, rows, strict=True)]
    print(f"held out: {sum(errors) / len(errors):.1%} mean error")
    losses, gains = choices(rows, predictions, cublas)
    print(f"the chosen config over the best: {mean(losses):.3f}, at most {max(losses):.2f}")
    print(f"cuBLAS over the chosen config: {mean(gains):.3f}, at least {min(gains):.2f}")


def read(path: Path) -> tuple[list[Row], dict[Product, float]]:
    """Times of the kernel, without splits by 16, which are never best; and cuBLAS's."""
    rows, cublas = [], {}
    for m, n, k, kernel, config, us, _ in json.loads(path.read_text())["rows"]:
        if kernel == "torch":
            cublas[m, n, k] = us
        elif kernel == "sm90.few_rows" and Config(*config).split < 16:
            rows.append(Row((m, n, k), Config(*config), us))
    return rows, cublas


def terms_of(rows: Sequence[Row]) -> Tensor:
    """(rows, terms), float64."""
    return torch.tensor([few_rows_cost.terms(row.config, Work(*row.product)) for row in rows], dtype=torch.float64)


def fit(rows: Sequence[Row], steps: int = 4000) -> list[float]:
    """The factors, none negative, of the least squared relative error: projected gradient descent with momentum."""
    relative = terms_of(rows) / torch.tensor([[row.us] for row in rows], dtype=torch.float64)
    scale = relative.amax(0)
    a = relative / scale
    gram, target = a.T @ a, a.sum(0)
    rate = 1 / torch.linalg.matrix_norm(gram, 2)
    x, ahead, weight = torch.zeros_like(scale), torch.zeros_like(scale), 1.0
    for _ in range(steps):
        stepped = (ahead - rate * (gram @ ahead - target)).clamp_min(0)
        heavier = (1 + math.sqrt(1 + 4 * weight**2)) / 2
        x, ahead, weight = stepped, stepped + (weight - 1) / heavier * (stepped - x), heavier
    return list((x / scale).tolist())


def held_out(rows: Sequence[Row]) -> list[float]:
    """Each row's prediction by a fit to rows of other shapes."""
    shapes = sorted({row.product[1:] for row in rows})
    random.Random(1).shuffle(shapes)
    predictions = [0.0] * len(rows)
    for fold in range(FOLDS):
        left_out = set(shapes[fold::FOLDS])
        factors = torch.tensor(fit([row for row in rows if row.product[1:] not in left_out]), dtype=torch.float64)
        for i, us in enumerate((terms_of(rows) @ factors).tolist()):
            if rows[i].product[1:] in left_out:
                predictions[i] = us
    return predictions


def choices(
    rows: Sequence[Row], predictions: Sequence[float], cublas: dict[Product, float]
) -> tuple[list[float], list[float]]:
    """For each product: time of the chosen config over the best, and cuBLAS's time over the chosen config's."""
    allowed = set(few_rows_model.defaults(UNSCALED))
    losses, gains = [], []
    for product in sorted({row.product for row in rows}):
        own = [i for i, row in enumerate(rows) if row.product == product]
        chosen = min((i for i in own if rows[i].config in allowed), key=lambda i: predictions[i])
        losses.append(rows[chosen].us / min(rows[i].us for i in own))
        gains.append(cublas[product] / rows[chosen].us)
    return losses, gains


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


if __name__ == "__main__":
    main()
