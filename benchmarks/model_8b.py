"""A whole model: Llama-3.1-8B's shape with random bf16 weights, prefill 1x2048 and decoding at batch 1.

    python benchmarks/model_8b.py --json FILE             # a GPU, full size
    python benchmarks/model_8b.py --json FILE --tiny      # a CPU, to see that it runs

In one process, every variant (`llama_variants.py`) in turn, round by round:
  prefill_ms            one prompt, logits of the last token only
  decode_ms_per_token   (generate(160) - generate(32)) / 128: prefill and the ends of a call cancel
and once, `preparation_s`: from the plain model to the end of the first calls.

Before timing, each variant's logits are compared with an fp32 run of the same weights, beside the plain model's own
error (at most twice that), and its tokens with what the plain model's forward ranks first on the same text. Floors
are the bytes a token must read and the operations of the prompt, over the rates measured in the same run.
"""

import argparse
import copy
import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llama_variants import SHAPES, Variant, build, variants

from tilewright.bench import machine
from tilewright.bench.bandwidth import stream_calls
from tilewright.bench.commit import commit
from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.bench.timing import interleave, rounds_order

SCHEMA = 1
SHORT, LONG = 32, 160
_STREAM_BYTES = 1 << 30


def main() -> int:
    """Build, check, time, write. Returns 1 when a variant fails its check."""
    options = arguments()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = {name: getattr(options, name) for name in SHAPES["8b"]}
    model = build(shape, getattr(torch, options.dtype), device)
    prompt = torch.randint(shape["vocab"], (1, shape["context"]), device=device)
    exact = exact_logits(model, prompt)

    before = machine.clocks(device)
    running, rows, failed = [], {}, []
    attentions = options.attention.split(",")
    for variant in variants(model, prompt, attentions=attentions, compiled=options.compile, new_tokens=LONG):
        rows[variant.name] = {"commit": commit(), "preparation_s": variant.preparation_s, **variant.facts}
        rows[variant.name] |= check(variant, model, exact)
        failed += [variant.name] if exceeds(rows, variant.name) else []
        running.append(variant)
        print(f"{variant.name}: {rows[variant.name]}", file=sys.stderr, flush=True)

    add(rows, "prefill_ms", time_prefill(running, device, options.rounds))
    add(rows, "decode_ms_per_token", time_decode(running, device, options.decode_rounds))
    for variant in running if device.type == "cuda" else []:
        rows[variant.name]["kernels_per_token"] = kernels_per_token(variant)
    floors = floors_of(model, shape, device)
    after = machine.clocks(device)

    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "schema": SCHEMA,
        "machine": machine.describe(device, before=before, after=after).to_dict(),
        "shape": shape | {"dtype": options.dtype, "new_tokens": [SHORT, LONG]},
        "floors": floors,
        "failed": failed,
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(rows, floors)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """The command line; single sizes override those of the shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--tiny", action="store_true", help="a shape for trying the program out")
    for name in SHAPES["8b"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--attention", default="auto", help="of the decode step, comma-separated: auto, split_kv, sdpa, grouped, model"
    )
    parser.add_argument("--compile", action="store_true", help="also Transformers' static cache with torch.compile")
    parser.add_argument("--rounds", type=int, default=20, help="of prefill")
    parser.add_argument("--decode-rounds", type=int, default=3)
    options = parser.parse_args()
    for name, value in SHAPES["tiny" if options.tiny else "8b"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


# Accuracy -------------------------------------------------------------------------------------------------------------


def exact_logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, computed in fp32 (without TF32) from the same weights: (1, V)."""
    wide = copy.deepcopy(model).float()
    with torch.inference_mode():
        return wide(prompt, use_cache=False, logits_to_keep=1).logits[:, -1]


@torch.inference_mode()
def check(variant: Variant, model: Any, exact: torch.Tensor) -> dict[str, float]:
    """logit_error: relative, against fp32. agreement: share of the tokens that the plain model ranks first itself."""
    error = (variant.prefill().float() - exact).norm() / exact.norm()
    text = variant.generate(LONG)
    logits = model(text[:, :-1], use_cache=False, logits_to_keep=LONG).logits
    agreement = (logits.argmax(-1) == text[:, -LONG:]).float().mean()
    return {"logit_error": float(error), "agreement": float(agreement)}


def exceeds(rows: dict[str, dict[str, Any]], name: str) -> bool:
    """Whether a variant's error is over twice the plain model's, or its agreement three standard errors below."""
    plain, own = rows["transformers_eager"], rows[name]
    share = min(max(plain["agreement"], 1 / LONG), 1 - 1 / LONG)
    lowest = plain["agreement"] - 3 * math.sqrt(share * (1 - share) / LONG)
    return own["logit_error"] > 2 * plain["logit_error"] + 1e-6 or own["agreement"] < lowest


# Time -----------------------------------------------------------------------------------------------------------------


def time_prefill(running: list[Variant], device: torch.device, rounds: int) -> dict[str, Samples]:
    """What a caller waits for, launches included."""
    calls = {variant.name: variant.prefill for variant in running}
    return interleave(calls, device=device, measure="wall", rounds=rounds, warmup=2)


def time_decode(running: list[Variant], device: torch.device, rounds: int) -> dict[str, Samples]:
    """Microseconds a token, one value a round; each round runs every variant's short and long call."""
    by_name = {variant.name: variant for variant in running}
    taken: dict[str, list[float]] = {name: [] for name in by_name}
    for index in range(rounds):
        for name in rounds_order(list(by_name), index):
            short, long = (seconds(by_name[name], count, device) for count in (SHORT, LONG))
            taken[name].append((long - short) / (LONG - SHORT) * 1e6)
    return {name: Samples(us) for name, us in taken.items()}


def seconds(variant: Variant, new_tokens: int, device: torch.device) -> float:
    """Wall time of one generate call."""
    begin = perf_counter()
    variant.generate(new_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begin


def add(rows: dict[str, dict[str, Any]], metric: str, samples: dict[str, Samples]) -> None:
    """Median and interval in ms, and how many times as long the plain model takes."""
    for name, own in samples.items():
        interval, ratio = own.interval(), paired_ratio(samples["transformers_eager"], own)
        rows[name][metric] = {
            "median": own.median / 1e3,
            "low": interval.low / 1e3,
            "high": interval.high / 1e3,
            "speedup": ratio.value,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
        }


def kernels_per_token(variant: Variant) -> float:
    """Device kernels of one decode step, counted by the profiler as the difference of two calls."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for new_tokens in (4, 12):
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            variant.generate(new_tokens)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == DeviceType.CUDA for event in recorded.events()))
    return (counts[1] - counts[0]) / 8


def floors_of(model: Any, shape: dict[str, int], device: torch.device) -> dict[str, float]:
    """The least a token and a prompt can take, at rates measured here: a 1 GiB read, and the gate-and-up product."""
    item = next(model.parameters()).element_size()
    embedding = model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters()) - embedding.nbytes
    head_dim = shape["hidden"] // shape["heads"]
    positions = shape["context"] + (SHORT + LONG) // 2
    cache = 2 * shape["layers"] * shape["kv_heads"] * head_dim * positions * item

    stream = _STREAM_BYTES if device.type == "cuda" else _STREAM_BYTES >> 5
    x = torch.randn(shape["context"], shape["hidden"], dtype=embedding.dtype, device=device)
    w = torch.randn(2 * shape["intermediate"], shape["hidden"], dtype=embedding.dtype, device=device)
    calls = {f"read/{name}": call for name, call in stream_calls("read", stream, device, sets=2).items()}
    times = interleave({**calls, "product": lambda: torch.nn.functional.linear(x, w)}, device=device, rounds=10)
    read = stream / min(samples.median for name, samples in times.items() if name != "product")  # bytes per us
    rate = 2 * x.shape[0] * w.numel() / times["product"].median  # operations per us

    per_token = weights // item - model.get_output_embeddings().weight.numel()
    attention = 2 * shape["layers"] * shape["hidden"] * shape["context"] ** 2  # causal: half of 4 * H * D * S^2
    operations = 2 * per_token * shape["context"] + attention
    return {
        "bytes_per_token": weights + cache,
        "read_tb_s": read / 1e6,
        "decode_ms_per_token": (weights + cache) / read / 1e3,
        "prompt_tflop": operations / 1e12,
        "product_tflop_s": rate / 1e6,
        "prefill_ms": operations / rate / 1e3,
    }


def show(rows: dict[str, dict[str, Any]], floors: dict[str, float]) -> None:
    """The table, for the terminal."""
    print(f"{'':28} {'prefill ms':>11} {'ms/token':>9} {'ready s':>8} {'error':>8} {'agree':>6}")
    for name, row in rows.items():
        prefill, decode = row["prefill_ms"]["median"], row["decode_ms_per_token"]["median"]
        print(
            f"{name:28} {prefill:11.2f} {decode:9.3f} {row['preparation_s']:8.1f} "
            f"{row['logit_error']:8.4f} {row['agreement']:6.1%}"
        )
    print(f"{'floor':28} {floors['prefill_ms']:11.2f} {floors['decode_ms_per_token']:9.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
