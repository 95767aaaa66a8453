"""What the products bring to a model of Llama-3.1-8B's shape: prefill 1x2048, decoding at batch 1 and context 2048.

    python benchmarks/products_8b.py --json FILE                                   # a GPU, full size
    python benchmarks/products_8b.py --json FILE --shape tiny --device cpu         # a CPU, to see that it runs

Three variants on copies of one model, timed in turn in one process, all with a static cache and CUDA graphs:
  merged    every op but the products replaced, merged QKV and gate/up; products by cuBLAS
  linears   the same with `linear` in the patch, and merged products by the tables
  gated     the same with gate, up and their product in one kernel
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from llama_variants import SHAPES, Variant, build, merged, patched, static
from model_8b import LONG, check, exact_logits, time_decode, time_prefill

import tilewright
from tilewright.assistant.changes import merged_linear
from tilewright.assistant.changes.gated_gate_up import GATED_GATE_UP
from tilewright.assistant.workload import workload
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.errors import PatchError
from tilewright.models.report import OPS_OF_KIND


def patched_but_linears(model, prompt):
    """Our ops, linear layers left alone; what `patch` replaced, counted."""
    kinds = [kind for kind in OPS_OF_KIND if kind != "linear"]
    return str(tilewright.patch(model, verify=False, ops=kinds).report().counts())


def gated(model, prompt):
    """Gate, up and their product in one kernel; or the reason why the tables have none that is faster."""
    try:
        return GATED_GATE_UP.apply(model, workload(model, prompt[:, :16])).detail
    except PatchError as reason:
        return f"not applied: {reason}"


def with_cublas(make: Callable[[], Variant]) -> Variant:
    """Make a variant whose merged projections call torch's product, which the tables may not choose for them."""

    def call(run, *args):
        with mock.patch.object(merged_linear, "linear", F.linear):
            return run(*args)

    variant = call(make)
    return replace(variant, prefill=partial(call, variant.prefill), generate=partial(call, variant.generate))


def main():
    """Build, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--decode-rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    model = build(shape, torch.bfloat16, device)
    prompt = torch.randint(shape["vocab"], (1, shape["context"]), device=device)
    exact = exact_logits(model, prompt)
    before = machine.clocks(device)

    def make(name, *changes):
        return static(name, copy.deepcopy(model), prompt, LONG, "auto", list(changes))

    running = [
        with_cublas(partial(make, "merged", patched_but_linears, merged)),
        make("linears", patched, merged),
        make("gated", patched, merged, gated),
    ]
    rows = {v.name: {"commit": commit(), **v.facts, **check(v, model, exact)} for v in running}
    for metric, samples in (
        ("prefill_ms", time_prefill(running, device, options.rounds)),
        ("decode_ms_per_token", time_decode(running, device, options.decode_rounds)),
    ):
        for name, taken in samples.items():
            interval = taken.interval()
            rows[name][metric] = [taken.median / 1e3, interval.low / 1e3, interval.high / 1e3]
            print(name, metric, rows[name][metric], flush=True)
    for name, row in rows.items():
        print(name, {key: row[key] for key in ("logit_error", "agreement")})
    found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
    options.json.write_text(json.dumps({"machine": found, "shape": shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
