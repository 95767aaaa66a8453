"""Where the tests of sampling run: torch on the CPU, Triton in its interpreter, both and CUDA C++ on a GPU."""

from typing import NamedTuple

import pytest
import torch


class Place(NamedTuple):
    """A device and one backend on it."""

    device: str
    backend: str


TORCH = Place("cpu", "torch")
_PLACES = (
    pytest.param(TORCH, id="torch"),
    pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp),
    pytest.param(Place("cuda", "triton"), id="gpu", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", "torch"), id="gpu-torch", marks=pytest.mark.gpu),
)
everywhere = pytest.mark.parametrize("place", _PLACES)
everywhere_and_in_cuda = pytest.mark.parametrize(
    "place", [*_PLACES, pytest.param(Place("cuda", "cuda"), id="gpu-cuda", marks=pytest.mark.gpu)]
)
"""For ops with a kernel in CUDA C++."""


def keyed(rows, place, *, seed=7):
    """Seeds, all alike, and positions 0, 1, 2, ... of `rows` rows: independent draws, the same in every run."""
    positions = torch.arange(rows, dtype=torch.int64, device=place.device)
    return torch.full_like(positions, seed), positions


def assert_distributed(draws, probabilities):
    """Pearson's chi-square of counted draws is below its quantile 1 - 1e-4 (Wilson and Hilferty's approximation), and
    nothing of probability 0 was drawn.

    Draws come from fixed seeds, so the result is the same in every run.
    """
    counts = torch.bincount(draws.cpu(), minlength=len(probabilities)).double()
    wanted = probabilities.double().cpu() * counts.sum()
    assert not counts[wanted == 0].any()
    pooled = wanted < 5  # too few for the statistic: one class together
    if pooled.any():
        counts = torch.cat((counts[~pooled], counts[pooled].sum()[None]))
        wanted = torch.cat((wanted[~pooled], wanted[pooled].sum()[None]))
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if freedom:
        quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
        statistic = float(((counts - wanted) ** 2 / wanted).sum())
        assert statistic < quantile, (statistic, quantile)
