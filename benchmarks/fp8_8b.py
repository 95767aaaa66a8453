"""What float8 brings to a model of Llama-3.1-8B's shape: prefill 1x2048, decode at batch 1 and context 2048.

    python benchmarks/fp8_8b.py --json FILE [--rounds 10] [--shape tiny]

Three variants of one model, timed in turn in one process, each decoding from CUDA graphs with a static cache:
  static    as Transformers wrote it
  patched   `tilewright.patch(model)`
  fp8       `tilewright.patch(model, fp8=True)`: linear layers and MLPs in e4m3, 1x128 of x, 128x128 of the weights
logit_error: of the prompt's last logits, relative, against float32.  agreement: share of the tokens that the plain
model ranks first itself.  The weights are random, so logits lie closer together than a trained model's.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from llama_variants import SHAPES, build, shared_copy, static
from model_8b import LONG, check, exact_logits, time_decode, time_prefill

import tilewright
from tilewright.bench import machine
from tilewright.bench.commit import commit


def patched(model, prompt, *, fp8=False):
    """Our ops; what `patch` replaced, counted."""
    return str(tilewright.patch(model, verify=False, fp8=fp8).report().counts())


def in_float8(model, prompt):
    """Our ops, products in float8."""
    return patched(model, prompt, fp8=True)


def main():
    """Build, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    model = build(shape, torch.bfloat16, device)
    prompt = torch.randint(shape["vocab"], (1, shape["context"]), device=device)
    exact = exact_logits(model, prompt)
    before = machine.clocks(device)
    make = partial(static, prompt=prompt, new_tokens=LONG, attention="auto")
    running = [
        make("static", model),
        make("patched", shared_copy(model), changes=[patched]),
        make("fp8", shared_copy(model), changes=[in_float8]),
    ]
    rows = {v.name: {"preparation_s": v.preparation_s, **v.facts, **check(v, model, exact)} for v in running}
    rows = {name: {"commit": commit(), **row} for name, row in rows.items()}
    for metric, samples in (
        ("prefill_ms", time_prefill(running, device, options.rounds)),
        ("decode_ms_per_token", time_decode(running, device, 3)),
    ):
        for name, taken in samples.items():
            interval = taken.interval()
            rows[name][metric] = [taken.median / 1e3, interval.low / 1e3, interval.high / 1e3]
            print(name, metric, rows[name][metric], flush=True)
    for name, row in rows.items():
        print(name, {key: value for key, value in row.items() if key in ("logit_error", "agreement", "in_float8")})
    found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
    options.json.write_text(json.dumps({"machine": found, "shape": shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
