"""The embedded language model trained in float8 beside bf16: the same weights, batches and recipe, step by step.

    python benchmarks/fp8_training.py --json FILE [--steps 400]

Three models begin with the same weights:
  bf16     as `examples/stdlib_lm/train.py` trains: float32 weights, bf16 products
  fp8      every linear layer but the tied head is `nn.FP8Linear`: all three products in e4m3 with float32 sums
  shuffled bf16 on other batches: how far apart two such runs are anyway
`loss` is the mean over the steps since the entry before; `validation` is of the weights at the end, in float32.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "stdlib_lm"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import tokenizer as bpe  # noqa: E402
from measure import perplexity  # noqa: E402
from train import SEED, Recipe, build_model, crops, learning_rate, make_optimizer  # noqa: E402

import tilewright  # noqa: E402
from tilewright.bench import machine  # noqa: E402
from tilewright.bench.commit import commit  # noqa: E402


def in_float8(model):
    """Replace every linear layer but the head, which shares its weight with the embedding."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not model.lm_head:
                setattr(module, name, tilewright.nn.FP8Linear.from_linear(child))
    return model


class Run:
    """One model on its way: weights, optimizer, losses."""

    def __init__(self, model, recipe, stream, seed):
        self.model, self.recipe, self.stream = model.train(), recipe, stream
        self.optimizer = make_optimizer(model, recipe, stream.device)
        self.generator = torch.Generator(stream.device).manual_seed(seed)
        self.losses, self.seconds = [], 0.0

    def step(self, lr):
        """One update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = crops(self.stream, self.recipe, self.generator)
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())


def main():
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda")
    before = machine.clocks(device)
    recipe = Recipe()
    parts = data.split(data.collect(data.stdlib_root()))
    tokenizer = bpe.train_tokenizer(parts["train"])
    streams = {part: bpe.encode(tokenizer, parts[part]).to(device) for part in ("train", "validation")}
    torch.manual_seed(SEED)
    model = build_model(recipe.context).to(device)
    runs = {
        "bf16": Run(copy.deepcopy(model), recipe, streams["train"], SEED),
        "fp8": Run(in_float8(copy.deepcopy(model)), recipe, streams["train"], SEED),
        "shuffled": Run(copy.deepcopy(model), recipe, streams["train"], SEED + 1),
    }
    for step in range(options.steps):
        for run in runs.values():
            began = time.perf_counter()
            run.step(learning_rate(step / options.steps, recipe.lr))
            torch.cuda.synchronize()
            run.seconds += time.perf_counter() - began
    rows = {}
    for name, run in runs.items():
        losses = torch.stack(run.losses).view(-1, options.every).mean(1).tolist()
        model.load_state_dict(run.model.state_dict())
        found = perplexity(
            model,
            streams["validation"],
            text_bytes=data.byte_count(parts["validation"]),
            context=recipe.context,
            batch=recipe.batch,
        )
        rows[name] = {
            "loss": [round(x, 5) for x in losses],
            "validation": round(found.nats_per_token, 5),
            "seconds": round(run.seconds, 2),
            "commit": commit(),
        }
        print(name, "loss", rows[name]["loss"][::5], "validation", rows[name]["validation"], rows[name]["seconds"], "s")
    facts = {"steps": options.steps, "loss_every": options.every, "batch": recipe.batch, "context": recipe.context}
    found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
    options.json.write_text(json.dumps({"machine": found, **facts, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
