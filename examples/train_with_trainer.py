"""Train the embedded language model by transformers' Trainer, without tilewright and with it: two lines differ.

python examples/train_with_trainer.py               # 20 steps each, under a minute on a CPU
python examples/train_with_trainer.py --steps 400

Both runs have one seed, so the same batches in one order. Needs accelerate, which Trainer is built on.
"""

import argparse
import runpy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import tilewright

LOAD = runpy.run_path(str(Path(__file__).parent / "train_stdlib_lm.py"))["load"]
LR = 1e-4


def trained(model: nn.Module, rows: Tensor, steps: int, folder: str, *, patched: bool) -> list[float]:
    """The loss of each step."""
    optimizer = None
    if patched:
        tilewright.patch(model, mode="train")  # the first line more: verified on random tokens
        optimizer = tilewright.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)  # the second
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=LR,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=0,
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, None),  # Trainer makes what is None: torch's AdamW, a schedule
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """Train twice; returns the loss of each step without tilewright and with it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps
    runs = []
    for patched in (False, True):
        model, rows = LOAD()
        with tempfile.TemporaryDirectory() as folder:
            runs.append(trained(model, rows, steps, folder, patched=patched))
    losses = list(zip(*runs, strict=True))
    for step, (without, ours) in enumerate(losses):
        print(f"step {step:4d}  loss {without:.6f} without tilewright, {ours:.6f} with it")
    return losses


if __name__ == "__main__":
    main()
