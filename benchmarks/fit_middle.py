"""Fit the cost model of dense products of at most 512 rows to measured times, and judge it on held-out shapes.

    python benchmarks/fit_middle.py FILE...        # JSON of benchmarks/product_costs.py, with --middle or without

For `sm90.dense` and `sm90.fp8` prints the factors (`US` and `US_8_BIT` of `middle_cost.py`); of five fits, each without
a fifth of the shapes (N, K), the mean error of the held-out predictions and the time of the config that a fit prefers
over that of the best config; and for each M cuBLAS's time over that of the fit's choice, and over that of the best.
Rows of tiles that are not full are left out of older files, whose kernels read boxes of rows that do not exist.
"""

import argparse
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.gemm.kernels.sm90 import dense_kernel, fp8_kernel, middle_cost
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile

Shape = tuple[int, int, int]
FOLDS = 5
KERNELS = {"sm90.dense": (dense_kernel.Config, 2, "torch"), "sm90.fp8": (fp8_kernel.Config, 1, "torch fp8")}


class Row(NamedTuple):
    """One measured time of a product (M, N, K)."""

    shape: Shape
    tile: Tile
    us: float


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    files = parser.parse_args().files
    for kernel, (_, itemsize, _) in KERNELS.items():
        rows, cublas = read(files, kernel)
        if not rows:
            continue
        factors = fit(rows, itemsize)
        print(f"\n{kernel}: {len(rows)} times of {len({row.shape for row in rows})} products")
        print(middle_cost.Terms(*(float(f"{factor:.3g}") for factor in factors)))
        held = held_out(rows, itemsize)
        errors = [abs(math.log(us / row.us)) for us, row in zip(held, rows, strict=True)]
        losses = sorted(chosen.us / best.us for chosen, best in choices(rows, held))
        regret = f"{mean(losses):.3f}, the median {losses[len(losses) // 2]:.3f}, at most {losses[-1]:.3f}"
        print(f"held out: {sum(errors) / len(errors):.1%} mean error; the choice over the best {regret}")
        judge(rows, held, cublas)


def judge(rows: Sequence[Row], predictions: Sequence[float], cublas: dict[Shape, float]) -> None:
    """Prints cuBLAS's time over the choice's and the best's, for each M."""
    ratios: dict[int, list[tuple[float, float]]] = {}
    for chosen, best in choices(rows, predictions):
        if chosen.shape in cublas:
            vendor = cublas[chosen.shape]
            ratios.setdefault(chosen.shape[0], []).append((vendor / chosen.us, vendor / best.us))
    for m, own in sorted(ratios.items()):
        choice, best_of_all = (mean(pair[i] for pair in own) for i in (0, 1))
        print(f"M = {m}: cuBLAS over the choice {choice:.3f}, over the best {best_of_all:.3f}")


def read(files: Iterable[Path], kernel: str) -> tuple[list[Row], dict[Shape, float]]:
    """Times of the kernel for M from 64 to 512, and cuBLAS's."""
    config_type, _, vendor = KERNELS[kernel]
    rows, cublas = [], {}
    for file in files:
        for m, n, k, name, values, us, _ in json.loads(file.read_text())["rows"]:
            if name == vendor:
                cublas[m, n, k] = us
            elif name == kernel and 64 <= m <= middle_cost.MAX_ROWS:
                config = config_type(*values)
                tile = Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n, config.split)
                older = len(values) < len(config)
                if not older or m % (tile.block_m * tile.cluster_m) == 0:
                    rows.append(Row((m, n, k), tile, us))
    return rows, cublas


def terms_of(rows: Sequence[Row], itemsize: int) -> Tensor:
    """(rows, terms), float64."""
    found = [middle_cost.terms(Problem(*row.shape, itemsize=itemsize), row.tile) for row in rows]
    return torch.tensor(found, dtype=torch.float64)


def predicted(terms: Tensor, factors: Tensor) -> Tensor:
    """Microseconds of each row, as `middle_cost.predicted_us`."""
    us = terms * factors
    one_after_another, at_once = us[:, : -middle_cost.OVERLAPPING], us[:, -middle_cost.OVERLAPPING :]
    return one_after_another.sum(1) + (at_once**middle_cost.POWER).sum(1) ** (1 / middle_cost.POWER)


def fit(rows: Sequence[Row], itemsize: int, steps: int = 3000) -> list[float]:
    """The factors of the least squared logarithm of predicted over measured, from those of the module on."""
    terms = terms_of(rows, itemsize)
    times = torch.tensor([row.us for row in rows], dtype=torch.float64)
    start = torch.tensor(middle_cost.US if itemsize == 2 else middle_cost.US_8_BIT, dtype=torch.float64)
    logarithms = start.log().requires_grad_()
    optimizer = torch.optim.Adam([logarithms], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (predicted(terms, logarithms.exp()) / times).log().square().mean().backward()
        optimizer.step()
    return list(logarithms.detach().exp().tolist())


def held_out(rows: Sequence[Row], itemsize: int) -> list[float]:
    """Each row's prediction by a fit to rows of other shapes."""
    shapes = sorted({row.shape[1:] for row in rows})
    random.Random(1).shuffle(shapes)
    predictions = [0.0] * len(rows)
    for fold in range(FOLDS):
        left_out = set(shapes[fold::FOLDS])
        kept = [row for row in rows if row.shape[1:] not in left_out]
        factors = torch.tensor(fit(kept or rows, itemsize, 1500), dtype=torch.float64)
        for i, us in enumerate(predicted(terms_of(rows, itemsize), factors).tolist()):
            if rows[i].shape[1:] in left_out:
                predictions[i] = us
    return predictions


def choices(rows: Sequence[Row], predictions: Sequence[float]) -> list[tuple[Row, Row]]:
    """For each product: the row that the predictions prefer, and that of the least time."""
    found = []
    for shape in sorted({row.shape for row in rows}):
        own = [i for i, row in enumerate(rows) if row.shape == shape]
        chosen = rows[min(own, key=lambda i: middle_cost.preference(predictions[i], rows[i].tile))]
        found.append((chosen, min((rows[i] for i in own), key=lambda row: row.us)))
    return found


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
