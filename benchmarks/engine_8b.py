"""`tilewright.Engine` with a model of Llama-3.1-8B's shape: a saturated load, one request alone, the first token.

    python benchmarks/engine_8b.py --json FILE                                   # a GPU, full size
    python benchmarks/engine_8b.py --json FILE --shape tiny --device cpu         # a CPU, to see that it runs

One model with random weights, in turn
  plain     as transformers builds it
  patched   after `tilewright.patch(model)`
  merged    patched, with merged projections
  fp8       after `tilewright.patch(model, fp8=True)`: products in e4m3, the cache in bf16
Each serves
  load      --requests prompts of --prompt tokens with --new-tokens new ones, all at once: output tokens a second
  alone     one request of --context tokens: milliseconds a token, from two lengths of the answer; prefill cancels
  first     one request of 128 tokens: milliseconds to its first token
`agreement`: share of the load's tokens that are those of `plain`, up to each request's first difference; weights are
random, so the two best tokens of a step often lie within rounding.  Captures and compilation are apart.
"""

import argparse
import copy
import gc
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from continuous_batching import agreement
from llama_variants import SHAPES, build, merged, shared_copy

import tilewright
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.engine import Engine, SamplingParams

VARIANTS = ("plain", "patched", "merged", "fp8")


def variant(name: str, model: Any) -> Any:
    """A model of its own; all but "merged" share the weights."""
    if name not in VARIANTS:
        raise SystemExit(f"no variant named {name}; there are {', '.join(VARIANTS)}")
    own = copy.deepcopy(model) if name == "merged" else shared_copy(model)
    if name != "plain":
        tilewright.patch(own, verify=False, fp8=name == "fp8")
    if name == "merged":
        merged(own, torch.zeros(1, 16, dtype=torch.int64, device=model.device))
    return own


def alone(engine: Engine, prompt: list[int], short: int, long: int) -> float:
    """Milliseconds a token of one request."""
    times = {}
    for count in (short, long):
        params = SamplingParams(max_tokens=count)
        engine.generate([prompt], params)
        begin = perf_counter()
        engine.generate([prompt], params)
        times[count] = perf_counter() - begin
    return 1e3 * (times[long] - times[short]) / (long - short)


def first(engine: Engine, prompts: list[list[int]]) -> float:
    """Milliseconds from a request to its first token, the median; prompts are new to the cache."""
    times = []
    for prompt in prompts:
        begin = perf_counter()
        pieces = engine.stream(prompt, SamplingParams(max_tokens=2))
        next(pieces)
        times.append(perf_counter() - begin)
        list(pieces)
    return 1e3 * median(times)


def main() -> None:
    """Measure the variants and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a request")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the request alone")
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--variants", default="plain,patched,fp8", help="separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    model = build(shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    prompts = torch.randint(shape["vocab"], (options.requests, options.prompt)).tolist()
    context = torch.randint(shape["vocab"], (options.context,)).tolist()
    fresh = torch.randint(shape["vocab"], (6, 128)).tolist()
    before = machine.clocks(device)
    rows: dict[str, Any] = {}
    expected: list[list[int]] = []
    for name in options.variants.split(","):
        own = variant(name, model)
        longest = max(options.prompt + options.new_tokens, options.context + 96)
        with Engine(own, max_batch=options.requests, max_context=longest, step_tokens=options.step_tokens) as engine:
            begin = perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=2))  # compiles, captures
            engine.warmup()
            ready = perf_counter()
            outputs = engine.generate([p[::-1] for p in prompts], SamplingParams(max_tokens=options.new_tokens))
            seconds = perf_counter() - ready
            tokens = [output.tokens for output in outputs]
            expected = expected or tokens
            rows[name] = {
                "commit": commit(),
                "preparation_s": ready - begin,
                "output_tokens_s": sum(map(len, tokens)) / seconds,
                "agreement": agreement(tokens, expected),
                "alone_ms_per_token": alone(engine, context, 32, 96),
                "first_token_ms": first(engine, fresh),
                "statistics": engine.statistics,
            }
        print(name, rows[name], flush=True)
        found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
        load = {name: getattr(options, name) for name in ("requests", "prompt", "new_tokens", "context", "step_tokens")}
        options.json.write_text(
            json.dumps({"machine": found, "shape": shape, "load": load, "rows": rows}, indent=1) + "\n"
        )
        del own, engine, outputs
        gc.collect()


if __name__ == "__main__":
    main()
