"""A patched model in transformers' Trainer: accumulation, autocast, checkpoints of activations and of runs.

A loss may be off the float64 run's twice as far as the unpatched model's, and by float32's noise.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.zoo import build, checkpoint, tokens
from torch import nn

import tilewright
from tilewright.dispatch.backends import module_exists
from tilewright.models import patch
from tilewright.models.specialise import patched_modules

pytestmark = pytest.mark.skipif(not module_exists("accelerate"), reason="Trainer needs accelerate")
ROWS = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
LR = 1e-2


class Killed(Exception):
    """Raised where a run ends before its last step."""


def kill_after(steps: int) -> Any:
    """A callback that ends the run after this many steps, when their checkpoint is written."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == steps:
                raise Killed

    return Kill()


def trainer_of(model: nn.Module, folder: Path, *, ours: bool, callbacks: Any = (), **options: Any) -> Any:
    """A transformers.Trainer.   ours: patched, with our optimizer."""
    from transformers import Trainer, TrainingArguments

    optimizer = None
    if ours:
        patch(model, mode="train", verify=False)
        optimizer = tilewright.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    args = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": LR, **options}
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            **args,
        ),
        train_dataset=ROWS,
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses(tmp_path: Path) -> None:
    plain, found = build("llama"), []
    for model, ours in ((copy.deepcopy(plain).double(), False), (copy.deepcopy(plain), False), (plain, True)):
        trainer = trainer_of(model, tmp_path, ours=ours)
        trainer.train()
        found.append(losses(trainer))
    for exact, unpatched, patched in zip(*found, strict=True):
        assert abs(patched - exact) <= 2 * abs(unpatched - exact) + 1e-6 * exact
    assert found[2][-1] < found[2][0]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"checkpoint": True},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["accumulation", "checkpointing", "bf16", "label_smoothing"],
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for ours in (False, True):
        model, settings = build("llama"), dict(options)
        if settings.pop("checkpoint", False):
            checkpoint(model, reentrant=False)  # Trainer's own argument has another name from transformers 5.23 on
        trainer = trainer_of(model, tmp_path, ours=ours, max_steps=2, **settings)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=4e-3 if "bf16" in options else 1e-5)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    straight = trainer_of(build("llama"), tmp_path / "straight", ours=True, **saving)
    straight.train()
    killed = trainer_of(build("llama"), tmp_path / "killed", ours=True, callbacks=[kill_after(2)], **saving)
    with pytest.raises(Killed):
        killed.train()
    resumed = trainer_of(build("llama"), tmp_path / "killed", ours=True, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, straight.model.state_dict()[name]), name
    saved = type(build("llama")).from_pretrained(tmp_path / "killed" / "checkpoint-4")
    assert not list(patched_modules(saved))
    for name, value in saved.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
