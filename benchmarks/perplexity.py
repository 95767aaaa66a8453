"""Perplexity of a language model with its linear layers in every format of `tilewright.quantize_`, on held-out prompts.

    python benchmarks/perplexity.py [MODEL] [--prompts FILE] [--formats int4,nvfp4] [--device cuda] [--json FILE]

MODEL: a folder of transformers; by default the embedded model of examples/stdlib_lm with its prompts, whose linear
layers are 64 to 512 wide, so that `--smallest 64` takes all but the head.  FILE: lines of JSON with a `text`.
The first `--calibration` prompts calibrate the formats that need it and are not measured; every token of the others
but the first of each prompt is predicted once.  Rows are printed as they come: perplexity, its rise over the wide
model's in the same dtype, and whether `tilewright optimize` would accept it (0.5 % with 8 bits, 3 % with fewer).
"""

import argparse
import copy
import json
import math
import runpy
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilewright
from tilewright.assistant.changes.quantised_linears import QUANTISED
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.models.quantise import FORMATS

STDLIB_LM = Path(__file__).parent.parent / "examples" / "stdlib_lm"
ACCEPTED = {change.format: change.perplexity_rise for change in QUANTISED}


@torch.inference_mode()
def perplexity(model: nn.Module, prompts: Iterable[Tensor]) -> float:
    """exp of the mean negative log likelihood of all tokens after the first of each prompt (1, S)."""
    nats, count = 0.0, 0
    for tokens in prompts:
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].double()
        nats += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += tokens.shape[1] - 1
    return math.exp(nats / count)


def load(model: Path | None, prompts: Path | None, device: str, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    """The model, and the token ids (1, S) of every prompt."""
    folder = model or runpy.run_path(str(STDLIB_LM / "weights.py"))["unpack"](STDLIB_LM / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (prompts or folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    tokens = [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids.to(device) for line in lines]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device), tokens


def main() -> None:
    """Measure the wide model, then a copy in each format; print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--smallest", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, prompts = load(options.model, options.prompts, options.device, getattr(torch, options.dtype))
    calibration, measured = prompts[: options.calibration], prompts[options.calibration :]
    length = min(tokens.shape[1] for tokens in calibration)
    inputs = torch.cat([tokens[:, :length] for tokens in calibration])
    wide = perplexity(model, measured)
    rows = [{"format": options.dtype, "layers": 0, "perplexity": wide, "rise": 0.0}]
    print("| format | layers | perplexity | rise | accepted |\n|---|---|---|---|---|")
    print(f"| {options.dtype} | | {wide:.3f} | | |", flush=True)
    for format in options.formats:
        changed = copy.deepcopy(model)
        report = tilewright.quantize_(changed, format, smallest=options.smallest, inputs=inputs)
        value = perplexity(changed, measured)
        row = {"format": format, "layers": report.counts()["quant"], "perplexity": value, "rise": value / wide - 1}
        rows.append(row)
        accepted = f"{ACCEPTED[format]:.1%}: {'yes' if row['rise'] <= ACCEPTED[format] else 'no'}"
        print(f"| {format} | {row['layers']} | {value:.3f} | {row['rise']:+.2%} | {accepted} |", flush=True)
    if options.json:
        tokens = sum(t.shape[1] - 1 for t in measured)
        facts = {"commit": commit(), "machine": machine.describe(options.device).to_dict(), "tokens": tokens}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
