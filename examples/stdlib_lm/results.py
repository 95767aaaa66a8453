"""Fill the README's results from what the training run wrote: `python examples/stdlib_lm/results.py`."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"


def table(summary: dict[str, Any]) -> str:
    """Markdown of one `training.json`."""
    parts, versions, recipe = summary["data"], summary["machine"], summary["recipe"]
    exact, rounded, xz = summary["held_out_fp32"], summary["held_out_bf16"], summary["held_out_xz_bits_per_byte"]
    prompts, saved = summary["prompts_bf16"], summary["prompts_saved"]
    part_rows = "".join(
        f"| {name.replace('_', '-')} | {part['files']} | {part['bytes']:,} | {part['tokens']:,} |\n"
        for name, part in ((name, parts[name]) for name in ("train", "validation", "held_out"))
    )
    seen = summary["tokens_seen"]
    return (
        f"{summary['parameters']:,} parameters, trained on {versions['device']} with Python {versions['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}.\n"
        f"{summary['steps']:,} steps of {recipe['batch']} x {recipe['context']} tokens ({seen / 1e6:.0f} M tokens, "
        f"{seen / parts['train']['tokens']:.0f} passes) in {summary['training_seconds']:.0f} s; "
        f"{summary['total_seconds']:.0f} s with tokenizer and measurements. "
        f"Checkpoint of step {summary['best_step']:,}.\n\n"
        "| part | files | bytes | tokens |\n|---|---:|---:|---:|\n"
        f"{part_rows}\n"
        "| held-out | perplexity per token | bits per byte |\n|---|---:|---:|\n"
        f"| float32 weights | {exact['perplexity']:.3f} | {exact['bits_per_byte']:.4f} |\n"
        f"| bf16 | {rounded['perplexity']:.3f} | {rounded['bits_per_byte']:.4f} |\n"
        f"| `xz -9` on the same text, for scale | | {xz:.4f} |\n\n"
        "| prompts, which are held-out text | perplexity per token | bits per byte |\n|---|---:|---:|\n"
        f"| bf16 | {prompts['perplexity']:.3f} | {prompts['bits_per_byte']:.4f} |\n"
        f"| mantissas rounded to 4 bits, as committed | {saved['perplexity']:.3f} | {saved['bits_per_byte']:.4f} |\n"
    )


def filled(readme: str, summary: dict[str, Any]) -> str:
    """The README with its results section replaced."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table(summary) + END + tail


def main() -> None:
    """Rewrite the README in place."""
    readme = HERE / "README.md"
    summary = json.loads((HERE / "model" / "training.json").read_text())
    readme.write_text(filled(readme.read_text(), summary))


if __name__ == "__main__":
    main()
