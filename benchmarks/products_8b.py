"""What the products bring to a model of Llama-3.1-8B's shape: prefill 1x2048, decode at batch 1 and context 2048.

    python benchmarks/products_8b.py [--json FILE] [--backends cuda] [--remeasure] [--rounds 10]

Three variants on copies of examples/llama_8b.py's model, timed in turn in one process:
  merged    static decode with CUDA graphs, op replacement but for linears, merged QKV and gate/up; products by cuBLAS
  linears   the same with `linear` in the patch, and merged products by the tables
  gated     the same with the gated gate/up product on top
Buckets of the model's products that no table has (M = 1 and 2048) are measured first, default configurations, weights
of 32 layers in turn so that the L2 is cold, and go into a table of this run alone (its `noise` is not measured).
"""

import argparse
import copy
import itertools
import json
import os
import tempfile
from datetime import date
from pathlib import Path
from runpy import run_path
from time import perf_counter

import torch
import torch.nn.functional as F
from llama_variants import static
from model_8b import LONG, check, exact_logits, time_decode, time_prefill

import tilewright
from tilewright import ops, settings
from tilewright.assistant.changes import MERGED_GATE_UP, MERGED_QKV, merged_linear
from tilewright.assistant.changes.gated_gate_up import GATED_GATE_UP
from tilewright.assistant.workload import workload
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.timing import interleave
from tilewright.dispatch import contract
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.measured import by_rows
from tilewright.errors import BackendError, PatchError
from tilewright.hardware import device_info
from tilewright.models import gated_products, linears
from tilewright.models.patching import _KINDS

MODEL = Path(__file__).resolve().parents[1] / "examples" / "llama_8b.py"
BEGIN = perf_counter()
OURS = merged_linear.linear
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def say(*what):
    """A line of progress."""
    print(f"[{perf_counter() - BEGIN:6.1f} s]", *what, flush=True)


def cublas(x, weight, bias, backend=None):
    """torch's product, in the place of ours."""
    return F.linear(x, weight, bias)


def by(road):
    """Run the calls of a variant with this product behind merged projections."""

    def wrap(call):
        def run(*args):
            merged_linear.linear = road
            return call(*args)

        return run

    return wrap


# Changes, as `llama_variants.static` applies them ---------------------------------------------------------------------


def replaced(model, prompt):
    """Our ops, linears left alone."""
    return str(tilewright.patch(model, verify=False, ops=[k for k in _KINDS if k != "linear"]).report().counts())


def replaced_with_linears(model, prompt):
    """Our ops, linears too."""
    return str(tilewright.patch(model, verify=False).report().counts())


def merged(model, prompt):
    """One product for q, k, v and one for gate and up."""
    work = workload(model, prompt[:, :16])
    return "; ".join(change.apply(model, work).detail for change in (MERGED_QKV, MERGED_GATE_UP))


def gated(model, prompt):
    """Gate, up and their product in one kernel."""
    try:
        return GATED_GATE_UP.apply(model, workload(model, prompt[:, :16])).detail
    except PatchError as reason:
        return f"NOT APPLIED: {reason}"


# The tables -----------------------------------------------------------------------------------------------------------


def weights_of(model):
    """name -> (weights of all layers, rows to measure, gated); of a merged model."""
    layers = model.model.layers
    gate_up = [layer.mlp.gate_proj.tilewright_group.weight for layer in layers]
    return {
        "qkv": ([layer.self_attn.q_proj.tilewright_group.weight for layer in layers], (1, 2048), False),
        "o": ([layer.self_attn.o_proj.weight for layer in layers], (1, 2048), False),
        "gate_up": (gate_up, (1, 2048), False),
        "gate_up gated": (gate_up, (1, 2048), True),
        "down": ([layer.mlp.down_proj.weight for layer in layers], (1, 2048), False),
        "lm_head": ([model.lm_head.weight], (1,), False),
    }


@torch.inference_mode()
def measure(model, backends, remeasure):
    """Time what no table has, and use it."""
    rows = []
    for name, (weights, ms, is_gated) in weights_of(model).items():
        n, k = weights[0].shape
        sizes = linears.sizes(n, k, BF16, gated=is_gated)
        known = {} if remeasure else by_rows(linears.forward_op(), sizes, BF16, DEVICE)
        for m in ms:
            if m in known:
                continue
            x = torch.randn(m, k, dtype=BF16, device=DEVICE)
            calls = {}
            for backend in ("torch", *backends):
                each = itertools.cycle([w.detach() for w in weights])

                def call(x=x, each=each, is_gated=is_gated, backend=backend):
                    return ops.matmul(
                        x, next(each), trans_b=True, activation="swiglu" if is_gated else None, backend=backend
                    )

                try:
                    call()
                except (BackendError, RuntimeError) as error:
                    say(f"{name} M={m} {backend}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                calls[backend] = call
            us = {b: s.median for b, s in interleave(calls, device=DEVICE, rounds=12, limit_s=0.6).items()}
            best = min(us, key=us.get)
            say(f"measured {name} M={m} N={n} K={k}:", {b: round(t, 2) for b, t in us.items()})
            rows.append(
                {
                    "op": "matmul", "direction": "fwd", "bucket": linears.forward_op().bucket_text((m, *sizes)),
                    "dtype": "bfloat16", "numerics": "default", "backend": best, "config": None, "us": us[best],
                    "noise": 0.01, "torch_us": us["torch"],
                }
            )  # fmt: skip
    for m in (1, 2048):
        if m not in by_rows(contract("swiglu").forward, (14336,), BF16, DEVICE):
            a, b = torch.randn(2, m, 14336, dtype=BF16, device=DEVICE)
            took = interleave({"swiglu": lambda a=a, b=b: ops.swiglu(a, b)}, device=DEVICE, rounds=12, limit_s=0.6)
            us = took["swiglu"].median
            say(f"measured swiglu M={m}: {us:.2f}")
            rows.append(
                {
                    "op": "swiglu", "direction": "fwd", "bucket": f"M={m},N=14336", "dtype": "bfloat16",
                    "numerics": "default", "backend": "triton", "config": None, "us": us, "noise": 0.01,
                    "torch_us": None,
                }
            )  # fmt: skip
    if rows:
        use(rows)


def use(rows):
    """Let `auto` read these rows beside the tables."""
    info = device_info(DEVICE)
    header = {
        "gpu": info.name,
        "arch": info.arch,
        "sm_count": info.sm_count,
        "versions": {},
        "date": date.today().isoformat(),
    }
    extra = settings.current().tuning_table
    if extra is not None:
        rows = [*table.read(extra)[0]["rows"], *rows]
    path = Path(tempfile.mkdtemp()) / "table.json"
    path.write_text(json.dumps({"schema": 1, **header, "rows": rows}))
    os.environ["TILEWRIGHT_TUNING_TABLE"] = str(path)
    settings.reload()
    table.forget()


def main():
    """Build, check and time the variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backends", default="cuda")
    parser.add_argument("--remeasure", action="store_true", help="also buckets that the tables have")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    before = machine.clocks(DEVICE)

    model, inputs = run_path(str(MODEL))["factory"]()
    prompt = inputs["input_ids"]
    say("built")
    exact = exact_logits(model, prompt)
    torch.cuda.empty_cache()
    say("exact logits")

    def make(name, changes, road):
        merged_linear.linear = road
        # one after another: where no backend can run, the reason is seen at once
        variant = static(name, copy.deepcopy(model), prompt, LONG, "auto", changes)
        variant.prefill, variant.generate = by(road)(variant.prefill), by(road)(variant.generate)
        say(name, variant.facts)
        return variant

    probe = copy.deepcopy(model)
    merged(probe, prompt)
    measure(probe, options.backends.split(","), options.remeasure)
    del probe
    torch.cuda.empty_cache()
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        won = {m: round(us, 2) for m, us in linears.won(n, k, BF16, DEVICE).items()}
        say(f"N={n} K={k}: us won over cuBLAS by M: {won}")
    say("gated 28672x4096: us won over product and gate:", gated_products.won(28672, 4096, BF16, DEVICE))

    running = [
        make("merged", [replaced, merged], cublas),
        make("linears", [replaced_with_linears, merged], OURS),
        make("gated", [replaced_with_linears, merged, gated], OURS),
    ]
    rows = {}
    for variant in running:
        rows[variant.name] = {"commit": commit(), **variant.facts, **check(variant, model, exact)}
    say("checked")
    for metric, samples in (
        ("prefill_ms", time_prefill(running, DEVICE, options.rounds)),
        ("decode_ms_per_token", time_decode(running, DEVICE, 3)),
    ):
        for name, taken in samples.items():
            interval = taken.interval()
            rows[name][metric] = [taken.median / 1e3, interval.low / 1e3, interval.high / 1e3]
    say("timed")
    print(f"{'':10} {'prefill ms':>24} {'decode ms/token':>24} {'error':>8} {'agree':>7}")
    for name, row in rows.items():
        (p, *pi), (d, *di) = row["prefill_ms"], row["decode_ms_per_token"]
        print(
            f"{name:10} {p:8.2f} [{pi[0]:6.2f}, {pi[1]:6.2f}] {d:8.3f} [{di[0]:6.3f}, {di[1]:6.3f}] "
            f"{row['logit_error']:8.4f} {row['agreement']:7.1%}"
        )
    if options.json:
        found = machine.describe(DEVICE, before=before, after=machine.clocks(DEVICE)).to_dict()
        options.json.write_text(json.dumps({"machine": found, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
