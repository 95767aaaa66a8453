"""Measure what predictions are judged by: every change on many small models, as rows of `predictions.json`.

    python scripts/prediction_rows.py NAME ... --out rows.json     # without names: all models

A row holds the bound that a change predicted to save, the request it was predicted for, and the gain that was measured.
Models of FIT are what `assistant/shares.py` is fitted to; those of HELD_OUT judge it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewright.assistant import optimize
from tilewright.errors import VerificationError

# name: (class, dtype, hidden size, layers, intermediate size, vocabulary, prompt length)
MODELS: dict[str, tuple[str, str, int, int, int, int, int]] = {
    "llama_192_bf16": ("Llama", "bfloat16", 192, 5, 512, 4096, 344),
    "llama_128_fp32": ("Llama", "float32", 128, 4, 384, 2048, 128),
    "llama_384_fp32": ("Llama", "float32", 384, 6, 1024, 8192, 200),
    "qwen2_256_bf16": ("Qwen2", "bfloat16", 256, 8, 768, 4096, 96),
    "mistral_512_bf16": ("Mistral", "bfloat16", 512, 4, 1408, 8192, 256),
    "llama_640_fp32": ("Llama", "float32", 640, 4, 1728, 8192, 64),
    "llama_256_bf16": ("Llama", "bfloat16", 256, 6, 704, 4096, 200),
    "qwen2_192_fp32": ("Qwen2", "float32", 192, 6, 512, 4096, 160),
    "mistral_320_fp32": ("Mistral", "float32", 320, 5, 896, 4096, 96),
    "qwen3_448_bf16": ("Qwen3", "bfloat16", 448, 4, 1216, 8192, 128),
}
FIT = ("llama_192_bf16", "llama_128_fp32", "llama_384_fp32", "qwen2_256_bf16", "mistral_512_bf16", "llama_640_fp32")
HELD_OUT = tuple(name for name in MODELS if name not in FIT)
PROMPTS, NEW_TOKENS = 4, 32


def build(name: str) -> nn.Module:
    """The model with random weights, in evaluation mode."""
    import transformers

    kind, dtype, hidden, layers, inner, vocabulary, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, vocab_size=vocabulary,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.to(getattr(torch, dtype)).eval()


def rows(name: str, budget_s: float) -> list[dict[str, Any]]:
    """A row for each change that was timed on this model."""
    _, _, _, _, _, vocabulary, length = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (length + 8 * i,), generator=generator) for i in range(PROMPTS)]
    report = optimize(build(name), prompts=prompts, new_tokens=NEW_TOKENS, budget_s=budget_s, progress=print).report
    split = "fit" if name in FIT else "held out"
    found = []
    for change in report.changes:
        if change.measured is None or change.predicted is None:
            continue
        gain, machine = change.measured.decisive, report.machine
        found.append(
            {
                "model": name, "split": split, "change": change.name, "device": "cpu", "decision": change.decision,
                "bound_us": change.predicted.bound_us, "now_us": change.predicted.now_us,
                "gain": gain.gain, "gain_low": gain.gain_low, "gain_high": gain.gain_high,
                "clock": change.measured.clock, "threads": machine["torch_threads"], "machine": machine["device"],
                "torch": machine["torch"], "date": machine["date"],
            }
        )  # fmt: skip
    return found


def main() -> None:
    """Measure the models that were named, one after the other, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.out.read_text()) if options.out.exists() else []
    for name in options.names or MODELS:
        try:
            measured = rows(name, options.budget)
        except VerificationError as error:  # the rows of this run are lost; the others are not
            print(f"{name}: {error}")
            continue
        found = [row for row in found if row["model"] != name] + measured
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
