"""Train a small Llama on the Python standard library: one command, one folder that transformers loads.

    python examples/stdlib_lm/train.py --out examples/stdlib_lm/model --minutes 8

- 2.75 M parameters see the 2.3 M training tokens many times over, so the enemy is memorising. Against it: decoupled
  weight decay, a share of input tokens replaced at random (the targets stay true), an average of the weights over the
  last few epochs, and a checkpoint chosen on files that are neither trained on nor reported.
- The run ends after `--epochs`, or earlier when the rest of `--minutes` is needed for the final measurements. The
  learning rate follows the same clock, so it always reaches its end. Ended by epochs, a run depends on the seed alone.
- The token stream lives on the device; a batch is a gather of random crops. Weights are float32; on a GPU the matrix
  products are bf16.
"""

import argparse
import copy
import json
import lzma
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one order of sums in every run; read as CUDA starts

import data
import tokenizer as bpe
import torch
import weights
from measure import Perplexity, perplexity
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

SEED = 20261120
EVALUATIONS = 40  # of the validation part, evenly over the run
LOG_EVERY = 20  # steps; also how often the host waits for the device
PROMPTS = {"count": 48, "shortest": 1200, "longest": 1800}  # bytes; 250 to 600 tokens each, the file under 100 KB


@dataclass(frozen=True)
class Recipe:
    """What can be chosen for a run.  The committed model's choices, with 7 minutes, are in `model/training.json`."""

    minutes: float = 8.0  # the whole process: tokenizer, training, measurements
    epochs: float = 120.0
    batch: int = 32  # sequences
    context: int = 1024  # the longest prompt, about 600 tokens, and room for 400 more
    lr: float = 3e-3
    weight_decay: float = 1.0
    noise: float = 0.1  # share of input tokens replaced
    average: float = 0.998  # of the weights, over about 500 steps or 7 epochs
    compile: bool = False  # 5 layers train in minutes without; compiling costs a good part of one


def build_model(context: int) -> Any:
    """A Llama with the proportions of its large sisters: grouped queries, SwiGLU of 8/3 the width, a tied embedding.

    Deep and narrow is the better use of few parameters; 192, 32 and 512 are multiples of the tiles a kernel chooses.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=bpe.VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=bpe.END_ID,
        eos_token_id=bpe.END_ID,
        pad_token_id=bpe.END_ID,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW; matrices decay, norm weights do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=device.type == "cuda")


def learning_rate(progress: float, peak: float) -> float:
    """Linear to the peak over the first 3 % of the run, then a cosine to 1 % of it; progress goes from 0 to 1."""
    if progress < 0.03:
        return peak * max(progress, 1e-3) / 0.03
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97))
    return peak * (0.01 + 0.99 * cosine)


def crops(stream: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of random windows: inputs (batch, context) with noise, and the true next tokens (batch, context)."""
    device = stream.device
    starts = torch.randint(stream.numel() - recipe.context, (recipe.batch, 1), generator=generator, device=device)
    windows = stream[starts + torch.arange(recipe.context + 1, device=device)]
    inputs, targets = windows[:, :-1], windows[:, 1:]
    replaced = torch.rand(inputs.shape, generator=generator, device=device) < recipe.noise
    random_tokens = torch.randint(bpe.VOCAB_SIZE, inputs.shape, generator=generator, device=device)
    return torch.where(replaced, random_tokens, inputs), targets


@dataclass
class Trained:
    """What the training loop leaves: the best averaged model and what it cost."""

    model: Any
    steps: int
    seconds: float
    best_step: int
    validation: Perplexity
    log: list[dict[str, float]]


def train(
    model: Any,
    stream: torch.Tensor,
    evaluate: Callable[[nn.Module], Perplexity],
    recipe: Recipe,
    seconds: float,
) -> Trained:
    """Train for `recipe.epochs` passes over `stream` (tokens,) or for `seconds`; `evaluate` chooses the checkpoint."""
    device = stream.device
    if stream.numel() <= recipe.context:
        raise ValueError(
            f"the training part has {stream.numel()} tokens, too few for one window of {recipe.context}: "
            "choose a smaller --context or a larger --source"
        )
    planned_steps = max(1, math.ceil(recipe.epochs * stream.numel() / (recipe.batch * recipe.context)))
    generator = torch.Generator(device).manual_seed(SEED)
    optimizer = make_optimizer(model, recipe, device)
    average = copy.deepcopy(model).requires_grad_(False)
    trained = Trained(average, 0, 0.0, 0, Perplexity(0, math.inf, math.inf, math.inf), [])
    best_weights = average.state_dict()
    forward = torch.compile(model) if recipe.compile else model
    model.train()
    start, step, progress, evaluations = time.monotonic(), 0, 0.0, 0
    while progress < 1.0:
        lr = learning_rate(progress, recipe.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = crops(stream, recipe, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = forward(input_ids=inputs, use_cache=False).logits  # (batch, context, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():  # the average follows faster while it is young
            weight = 1 - min(recipe.average, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
        if step % LOG_EVERY == 0 or step == planned_steps:
            entry = {"step": step, "loss": round(loss.item(), 5), "lr": round(lr, 8)}
            trained.log.append({**entry, "seconds": round(time.monotonic() - start, 2)})
        progress = max(step / planned_steps, (time.monotonic() - start) / seconds)
        if progress >= (evaluations + 1) / EVALUATIONS:
            evaluations = int(progress * EVALUATIONS)
            result = evaluate(average)
            elapsed, nats = time.monotonic() - start, result.nats_per_token
            trained.log.append({"step": step, "validation_loss": round(nats, 5), "seconds": round(elapsed, 2)})
            print(f"step {step:6d}  {elapsed:6.1f} s  loss {loss.item():.3f}  validation {nats:.4f}", flush=True)
            if nats < trained.validation.nats_per_token:
                trained.validation, trained.best_step = result, step
                best_weights = copy.deepcopy(average.state_dict())
    trained.steps, trained.seconds = step, time.monotonic() - start
    average.load_state_dict(best_weights)
    return trained


def machine(device: torch.device) -> dict[str, str]:
    """The hardware and the versions that the numbers depend on."""
    import tokenizers
    import transformers

    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def run(recipe: Recipe, root: Path, out: Path) -> dict[str, Any]:
    """Everything from the source files to the written folder; returns what `training.json` holds."""
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = data.collect(root)
    parts = data.split(files)
    tokenizer = bpe.train_tokenizer(parts["train"])
    streams = {part: bpe.encode(tokenizer, members).to(device) for part, members in parts.items()}
    sizes = {part: data.byte_count(members) for part, members in parts.items()}
    tokens = {part: stream.numel() for part, stream in streams.items()}
    print(f"{len(files)} files; tokens: {tokens}", flush=True)

    def measure(model: nn.Module, part: str) -> Perplexity:
        return perplexity(model, streams[part], text_bytes=sizes[part], context=recipe.context, batch=recipe.batch)

    model = build_model(recipe.context).to(device)
    # A pass over the validation part tells how long the last such pass and the two over the held-out part will take.
    mark = time.monotonic()
    measure(model, "validation")
    reserve = 10 + 1.2 * (time.monotonic() - mark) * (1 + 2 * tokens["held_out"] / tokens["validation"])
    seconds = recipe.minutes * 60 - (time.monotonic() - began) - reserve
    if seconds <= 0:
        raise ValueError(f"--minutes {recipe.minutes} is too short: this machine needs {-seconds:.0f} s more to begin")
    trained = train(model, streams["train"], lambda candidate: measure(candidate, "validation"), recipe, seconds)

    exact = measure(trained.model, "held_out")
    out.mkdir(parents=True, exist_ok=True)
    excerpts = data.prompts(parts["held_out"], **PROMPTS)
    texts = [excerpt["text"] for excerpt in excerpts]
    trained.model.to(torch.bfloat16)
    rounded, rounded_excerpts = measure(trained.model, "held_out"), of_texts(trained.model, tokenizer, texts)
    for parameter in trained.model.parameters():
        parameter.data = weights.shortened(parameter.data)
    trained.model.save_pretrained(out)
    bpe.for_transformers(tokenizer, recipe.context).save_pretrained(out)
    compact(out / "tokenizer.json")
    saved = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(device)
    held_out_text = "".join(file.text for file in parts["held_out"]).encode()
    summary = {
        "recipe": asdict(recipe),
        "seed": SEED,
        "machine": machine(device),
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "data": {
            "fingerprint": data.fingerprint(files),
            **{p: {"files": len(parts[p]), "bytes": sizes[p], "tokens": tokens[p]} for p in data.PARTS},
        },
        "steps": trained.steps,
        "best_step": trained.best_step,
        "tokens_seen": trained.steps * recipe.batch * recipe.context,
        "training_seconds": round(trained.seconds, 1),
        "total_seconds": round(time.monotonic() - began, 1),
        "validation_fp32": asdict(trained.validation),
        "held_out_fp32": asdict(exact),
        "held_out_bf16": asdict(rounded),
        "prompts_bf16": asdict(rounded_excerpts),
        "prompts_saved": asdict(of_texts(saved, tokenizer, texts)),
        "held_out_xz_bits_per_byte": 8 * len(lzma.compress(held_out_text, preset=9)) / len(held_out_text),
    }
    (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "training_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in trained.log))
    (out / "train_files.sha256").write_text(data.hash_lines(parts["train"]))
    (out / "prompts.jsonl").write_text("".join(json.dumps(excerpt) + "\n" for excerpt in excerpts))
    weights.pack(out)
    print(f"held-out perplexity {exact.perplexity:.3f} in fp32, {rounded.perplexity:.3f} in bf16; wrote {out}")
    return summary


def of_texts(model: nn.Module, tokenizer: Tokenizer, texts: list[str]) -> Perplexity:
    """Of texts, one after the other: what anybody can repeat with the committed files."""
    encoded = [tokenizer.encode(text).ids for text in texts]
    stream = torch.tensor([token for ids in encoded for token in ids], device=model.device)
    return perplexity(model, stream, text_bytes=len("".join(texts).encode()), context=1024, batch=8)


def compact(path: Path) -> None:
    """The same JSON without white space: 107 KB instead of 263."""
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":")) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--source", type=Path, default=data.stdlib_root(), help="Python files (default: the library)")
    for field, default in asdict(Recipe()).items():
        option = f"--{field.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(option, type=type(default), default=default, help=f"default {default}")
    options = vars(parser.parse_args(arguments))
    out, source = options.pop("out"), options.pop("source")
    torch.use_deterministic_algorithms(True, warn_only=True)  # a kernel without such a form says so and runs
    run(Recipe(**options), source, out)


if __name__ == "__main__":
    main()
