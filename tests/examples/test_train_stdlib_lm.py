"""The training example runs, and goes on from the committed model's loss."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_stdlib_lm.py"


def test_two_steps(capsys):
    losses = runpy.run_path(str(EXAMPLE))["main"](["--steps", "2"])
    assert len(losses) == 2
    assert all(1.0 < loss < 4.5 for loss in losses)  # an untrained model has log 4096 = 8.3
    assert "ops.linear_cross_entropy of lm_head" in capsys.readouterr().out
