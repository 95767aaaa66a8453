"""The example of transformers' Trainer runs, and its losses are those of the unpatched model."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trainer.py"


def test_one_step():
    losses = runpy.run_path(str(EXAMPLE))["main"](["--steps", "1"])
    assert len(losses) == 1
    for without, ours in losses:
        assert 1.0 < without < 4.5
        assert ours == pytest.approx(without, rel=1e-5)
