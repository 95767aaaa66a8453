"""Transformers' continuous batching of a model of Llama-3.1-8B's shape: output tokens a second of each attention.

    python benchmarks/continuous_batching.py --json FILE                                   # a GPU, full size
    python benchmarks/continuous_batching.py --json FILE --shape tiny --device cpu         # a CPU, with psutil

One model, one load (64 requests of 512 tokens, 128 new tokens each), in turn through
  sdpa              paged|sdpa, transformers' own, as it comes
  sdpa_graphs       the same in CUDA graphs
  tilewright        paged|tilewright
  tilewright_graphs the same in CUDA graphs
  patched_graphs    the same after `tilewright.patch(model)`
`seconds` runs from the first request to the last token; warm-up, captures and a small load that compiles kernels are
apart.  agreement: share of the tokens that are those of the first variant, up to each request's first difference.  The
weights are random, so the two best tokens of a step often lie within rounding.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llama_variants import SHAPES, build, shared_copy
from transformers import ContinuousBatchingConfig, GenerationConfig

import tilewright
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.models import register_attention

Tokens = list[list[int]]


@dataclass(frozen=True)
class Variant:
    """One way to serve the load."""

    attention: str
    graphs: bool = False
    patched: bool = False


VARIANTS = {
    "sdpa": Variant("sdpa"),
    "sdpa_graphs": Variant("sdpa", graphs=True),
    "tilewright": Variant("tilewright"),
    "tilewright_graphs": Variant("tilewright", graphs=True),
    "patched_graphs": Variant("tilewright", graphs=True, patched=True),
}


def serve(
    model: Any, variant: Variant, prompts: Tokens, new_tokens: int, pages: dict[str, int]
) -> tuple[Tokens, dict[str, float]]:
    """Serve all prompts: the new tokens of each, and seconds by phase."""
    model.set_attn_implementation(f"paged|{variant.attention}")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=variant.graphs, **pages),
    )
    results: dict[str, Tokens] = {}
    try:
        begin = perf_counter()
        manager.warmup()
        manager.start()
        ready = perf_counter()
        names = manager.add_requests(prompts, max_new_tokens=new_tokens)
        while len(results) < len(prompts):
            result = manager.get_result(timeout=120)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching stopped: {result and result.error}")
            if result.is_finished():
                results[result.request_id] = result.generated_tokens
        seconds = perf_counter() - ready
    finally:
        manager.stop(hard_stop=len(results) < len(prompts))
        manager.destroy()
    return [results[name] for name in names], {"preparation_s": ready - begin, "seconds": seconds}


def agreement(tokens: Tokens, expected: Tokens) -> float:
    """Share of `tokens` before the first that is not the expected one."""
    same = 0
    for row, wanted in zip(tokens, expected, strict=True):
        pairs = zip(row, wanted, strict=True)
        same += next((n for n, (token, right) in enumerate(pairs) if token != right), len(row))
    return same / sum(map(len, tokens))


def main() -> None:
    """Serve the load in every variant, rounds in turn, and write tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a request")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device, shape = torch.device(options.device), SHAPES[options.shape]
    register_attention()
    torch.manual_seed(0)
    model = build(shape, torch.bfloat16, device)
    own = shared_copy(model)
    tilewright.patch(own, verify=False)
    prompts = torch.randint(shape["vocab"], (options.requests, options.prompt)).tolist()
    pages = {"num_blocks": 64, "max_batch_tokens": 256} if device.type == "cpu" else {}
    before = machine.clocks(device)
    rows: dict[str, dict[str, Any]] = {}
    expected: Tokens | None = None
    for number in range(options.rounds):
        for name in options.variants.split(","):
            variant = VARIANTS[name]
            if number == 0:
                serve(own if variant.patched else model, variant, prompts[:4], 4, pages)
            tokens, taken = serve(own if variant.patched else model, variant, prompts, options.new_tokens, pages)
            expected = expected or tokens
            row = rows.setdefault(name, {"commit": commit(), "agreement": agreement(tokens, expected), "rounds": []})
            row["rounds"].append({**taken, "output_tokens_s": sum(map(len, tokens)) / taken["seconds"]})
            print(name, number, row["rounds"][-1], f"agreement {row['agreement']:.3f}", flush=True)
            found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
            load = {"requests": options.requests, "prompt": options.prompt, "new_tokens": options.new_tokens}
            options.json.write_text(
                json.dumps({"machine": found, "shape": shape, "load": load, "rows": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
