"""What our attention brings to whole models: prefill, and a training step, beside torch's.

    python benchmarks/attention_models.py --json FILE [--rounds 10] [--calls prefill step] [--tiny]

Models: the trained one of examples/stdlib_lm, and Llama-3.1-8B's shape with random weights (all layers for prefill, 8
for training).  Attentions of one model in turn, round by round, in one process:
  sdpa         as transformers has it; torch chooses the kernel
  sdpa_cudnn   the same, cuDNN's kernel alone
  tilewright   ops.fmha, which chooses by the tables
Nothing else of the model is replaced.  error: of the prompt's last logits, or of all gradients, relative, against
float32; `ratio`: how many times as long sdpa takes, with the interval of paired rounds.
"""

import argparse
import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from llama_variants import SHAPES, build
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.statistics import paired_ratio
from tilewright.bench.timing import interleave
from tilewright.models import register_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "stdlib_lm"))
ATTENTIONS = {
    "sdpa": ("sdpa", None),
    "sdpa_cudnn": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "tilewright": ("tilewright", None),
}
PROMPTS = ((1, 2048), (1, 8192), (1, 32768), (8, 2048))
TRAINED = ((1, 8192), (4, 2048))
TRAINED_LAYERS = 8
DEVICE = torch.device("cuda")


def running(model, attention):
    """Prepares `model` for an attention; the context in which to call it."""
    name, kernel = ATTENTIONS[attention]
    model.set_attn_implementation(name)
    return nullcontext() if kernel is None else sdpa_kernel(kernel)


def prefill(model, ids):
    """The logits of the last token."""
    with torch.no_grad():
        return [model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]]


def step(model, ids):
    """The gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


CALLS = {"prefill": prefill, "step": step}


def distance(made, exact):
    """Relative, of all tensors together."""
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(made, exact, strict=True))
    return (off / sum(float(b.float().square().sum()) for b in exact)) ** 0.5


def compare(name, model, ids, call, rounds, exact):
    """One row for each attention.  exact: whether float32 fits beside the model."""
    wanted = None
    if exact:
        wide = copy.deepcopy(model).float()
        with running(wide, "sdpa"), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            wanted = [t.detach().clone() for t in call(wide, ids)]
        del wide
        torch.cuda.empty_cache()
    calls, rows = {}, {}
    for attention in ATTENTIONS:

        def run(attention=attention):
            with running(model, attention):
                return call(model, ids)

        calls[attention] = run
        made = run()
        rows[attention] = {} if wanted is None else {"error": distance(made, wanted)}
        del made
    del wanted
    taken = interleave(calls, device=DEVICE, measure="wall", rounds=rounds, warmup=2)
    for attention, samples in taken.items():
        ratio = paired_ratio(taken["sdpa"], samples)
        rows[attention] |= {"ms": samples.median / 1e3, "ratio": [ratio.value, ratio.low, ratio.high]}
        print(name, call.__name__, tuple(ids.shape), attention, rows[attention], flush=True)
    model.zero_grad(set_to_none=True)
    sizes = {"B": ids.shape[0], "S": ids.shape[1]}
    return {"model": name, "call": call.__name__, **sizes, "commit": commit(), "attentions": rows}


def main():
    """Build, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--tiny", action="store_true", help="a shape for trying the program out")
    options = parser.parse_args()
    register_attention()
    torch.manual_seed(0)
    from factory import factory

    before, rows = machine.clocks(DEVICE), []
    shape = SHAPES["tiny" if options.tiny else "8b"]

    def write(row):  # at once, for a run that somebody ends
        rows.append(row)
        found = machine.describe(DEVICE, before=before, after=machine.clocks(DEVICE)).to_dict()
        options.json.write_text(json.dumps({"machine": found, "shape": shape, "rows": rows}, indent=1) + "\n")

    model, inputs = factory()
    model, ids = model.to(DEVICE, torch.bfloat16), inputs["input_ids"].to(DEVICE)
    for name in options.calls:
        write(compare("stdlib_lm", model, ids, CALLS[name], options.rounds, True))
    work = {"prefill": (shape["layers"], PROMPTS), "step": (TRAINED_LAYERS, TRAINED)}
    for name in options.calls:
        layers, sizes = work[name]
        model = build(shape | {"layers": layers}, torch.bfloat16, DEVICE)
        for batch, length in sizes:
            ids = torch.randint(shape["vocab"], (batch, length), device=DEVICE)
            exact = length <= 8192
            write(compare(f"llama_8b x {layers} layers", model, ids, CALLS[name], options.rounds, exact))
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
