"""Train the embedded language model on with tilewright: two lines more than without.

python examples/train_stdlib_lm.py              # 20 steps, under a minute on a CPU
python examples/train_stdlib_lm.py --steps 400

The loop is a plain one; `train_with_trainer.py` does the same by transformers' Trainer.
"""

import argparse
import inspect
import runpy
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

import tilewright

HERE = Path(__file__).parent
CONTEXT, BATCH = 256, 2


def load() -> tuple[nn.Module, torch.Tensor]:
    """The committed model in float32, and the source of this interpreter's argparse as rows of CONTEXT tokens."""
    folder = runpy.run_path(str(HERE / "stdlib_lm" / "weights.py"))["unpack"]()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(inspect.getsource(argparse)).ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, ids[: ids.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)


def main(arguments: list[str] | None = None) -> list[float]:
    """Patch, train, undo; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, rows = load()
    model.to(device).train()
    rows = rows.to(device)

    patch = tilewright.patch(model, mode="train")  # the first line more: verified on random tokens
    print(patch.report())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    began = time.perf_counter()
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # no logits are made
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {time.perf_counter() - began:5.1f} s")

    patch.undo()  # the second, where the model goes on without tilewright
    return losses


if __name__ == "__main__":
    main()
