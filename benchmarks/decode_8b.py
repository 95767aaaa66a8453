"""Decoding steps of a model of Llama-3.1-8B's shape, at several batches and contexts: milliseconds of one step.

    python benchmarks/decode_8b.py --json FILE                                       # a GPU, full size
    python benchmarks/decode_8b.py --json FILE --shape tiny --device cpu             # a CPU, to see that it runs

One model, one case after another (batch x context), each in turn through
  transformers  its static cache, SDPA
  patched       `tilewright.patch(model)` over the same cache, whose steps attend through `fmha_decode`
  static        `StaticDecoder` of the patched model
  fp8           `StaticDecoder` of `tilewright.patch(model, fp8=True)`: products in e4m3, the cache in bf16
all of them as CUDA graphs of one step, so that no launch from Python counts.  Caches hold random numbers, the same in
every variant, instead of a prompt that would take longer than all that is measured.  Before timing the logits of a step
are compared with those of `transformers`: `logit_difference` is relative, for fp8 that of the products too.
The floor is the bytes of weights and cache over the read rate of this run.  A case that does not fit is named as such.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from llama_variants import SHAPES, build, shared_copy

import tilewright
from tilewright.bench import machine
from tilewright.bench.bandwidth import stream_calls
from tilewright.bench.commit import commit
from tilewright.bench.timing import interleave
from tilewright.generate import StaticDecoder
from tilewright.generate.attention import attention_of
from tilewright.models import register_attention
from tilewright.models.attention.step import step_mask

CASES = "1x2048,8x2048,64x2048,1x32768,8x32768"
_ROOM = 64  # positions behind the context
_STREAM_BYTES = 1 << 30
_MOST_DIFFERENCE = 0.13  # of logits of two bf16 runs, each of which is 0.066 off float32 (llama_8b.json)


class Step(NamedTuple):
    """logits(): those of one step at the context, eagerly.   reset(): go back there.   run(): one step, as timed."""

    logits: Callable[[], torch.Tensor]
    reset: Callable[[], None]
    run: Callable[[], object]


def fill(storage: torch.Tensor, seed: int) -> None:
    """The same numbers in every variant."""
    generator = torch.Generator(storage.device).manual_seed(seed)
    storage.normal_(generator=generator)


def over_static_cache(model: Any, batch: int, context: int, ours: bool) -> Step:
    """A step of `model` over transformers' static cache, with transformers' mask or with ours."""
    from transformers import StaticCache

    device, config, room = model.device, model.config, context + _ROOM
    cache = StaticCache(config, max_cache_len=room)
    head_dim = config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, config.num_key_value_heads, head_dim, model.dtype, device)
    for number, layer in enumerate(cache.layers):
        fill(layer.keys, 2 * number)
        fill(layer.values, 2 * number + 1)
    tokens = torch.ones(batch, 1, dtype=torch.int64, device=device)
    position = torch.full((1,), context, dtype=torch.int64, device=device)
    slots = torch.arange(room, device=device)

    def forward() -> torch.Tensor:
        mask = step_mask(batch, room, position[0], None, device) if ours else None
        if mask is None:
            mask = (slots <= position).expand(batch, 1, 1, room)
        out = model(
            input_ids=tokens, attention_mask=mask, position_ids=position.expand(batch, 1), past_key_values=cache
        )
        return out.logits[:, -1]

    def step() -> None:
        tokens.copy_(forward().argmax(-1, keepdim=True))
        position.add_(1)

    def reset() -> None:
        tokens.fill_(1)
        position.fill_(context)
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    return Step(forward, reset, captured_step(step, reset, device))


def captured_step(step: Callable[[], None], reset: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """`step` as a CUDA graph; as it is on a CPU."""
    reset()
    step()
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def by_decoder(model: Any, batch: int, context: int) -> Step:
    """A step of our decoder.  Its state is set by hand, in place of a prompt."""
    decoder = StaticDecoder(model, max_length=context + _ROOM, batch_size=batch)
    decoder.prefill(torch.ones(batch, 1, dtype=torch.int64, device=model.device))
    decoder.prepare(context, 2)
    state, cursor = decoder._state, decoder._cache.cursor
    for number, layer in enumerate(decoder._cache.layers):
        fill(layer.keys, 2 * number)
        fill(layer.values, 2 * number + 1)

    def reset() -> None:
        state.rewind()
        state.tokens.fill_(1)
        state.position_ids.fill_(context)
        cursor.position.fill_(context)
        cursor.prefilling, cursor.visible = False, decoder._visible(context)

    def logits() -> torch.Tensor:
        cursor.locate()
        with attention_of(model, decoder.attention):
            return decoder._forward(state.tokens, decoder._masks(), state.position_ids)

    def run() -> None:
        if decoder._graphs is None:
            decoder._step()
        else:
            decoder._graphs.replay((decoder._select.key, cursor.visible))

    return Step(logits, reset, run)


def variants(models: dict[str, Any], batch: int, context: int) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Each made ready when it is its turn, so that one cache exists at a time."""
    yield "transformers", lambda: over_static_cache(models["plain"], batch, context, ours=False)
    yield "patched", lambda: over_static_cache(models["patched"], batch, context, ours=True)
    yield "static", lambda: by_decoder(models["patched"], batch, context)
    if "fp8" in models:
        yield "fp8", lambda: by_decoder(models["fp8"], batch, context)


@torch.inference_mode()
def measured(make: Callable[[], Step], expected: torch.Tensor | None, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step, and how far its logits are from the expected ones."""
    begin, device = perf_counter(), torch.device(options.device)
    step = make()
    step.reset()
    logits = step.logits().float()
    row: dict[str, Any] = {"commit": commit(), "preparation_s": perf_counter() - begin, "logits": logits}
    if expected is not None:
        row["logit_difference"] = float((logits - expected).norm() / expected.norm())
    times = []
    for _ in range(options.rounds):
        step.reset()
        step.run()
        times.append(elapsed_ms(step.run, options.steps, device))
    row["ms"] = median(times)
    row["rounds"] = times
    return row


def elapsed_ms(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Milliseconds of one of `steps` steps."""
    if device.type != "cuda":
        begin = perf_counter()
        for _ in range(steps):
            run()
        return (perf_counter() - begin) / steps * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(steps):
        run()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / steps


def read_rate(device: torch.device) -> float:
    """Bytes a millisecond of the best stream that reads 1 GiB."""
    size = _STREAM_BYTES if device.type == "cuda" else _STREAM_BYTES >> 6
    times = interleave(stream_calls("read", size, device, sets=2), device=device, rounds=5)
    return size / min(samples.median for samples in times.values()) * 1e3


def main() -> int:
    """Measure case by case, write after each; 1 where a variant computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cases", default=CASES, help="batch x context, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of a round, at most 60")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device, shape = torch.device(options.device), SHAPES[options.shape]
    torch.manual_seed(0)
    models = {"plain": build(shape, torch.bfloat16, device)}
    models["patched"] = shared_copy(models["plain"])
    tilewright.patch(models["patched"], verify=False)
    models["patched"].set_attn_implementation(register_attention())
    if device.type == "cuda":
        models["fp8"] = shared_copy(models["plain"])
        tilewright.patch(models["fp8"], verify=False, fp8=True)
    rate, before = read_rate(device), machine.clocks(device)
    weights = sum(p.nbytes for p in models["plain"].parameters())
    weights -= models["plain"].get_input_embeddings().weight.nbytes
    rows: dict[str, dict[str, Any]] = {}
    wrong = []
    for case in options.cases.split(","):
        batch, context = map(int, case.split("x"))
        cache = 4 * batch * context * shape["layers"] * shape["kv_heads"] * (shape["hidden"] // shape["heads"])
        rows[case] = {"floor": {"ms": (weights + cache) / rate, "bytes": weights + cache}}
        expected = None
        for name, make in variants(models, batch, context):
            try:
                row = measured(make, expected, options)
            except torch.OutOfMemoryError:
                rows[case][name] = {"left_out": "does not fit"}
                print(case, name, "does not fit", flush=True)
                continue
            finally:
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            logits = row.pop("logits")
            expected = logits if expected is None else expected
            if name != "fp8" and row.get("logit_difference", 0.0) > _MOST_DIFFERENCE:
                wrong.append(f"{case} {name}")
            rows[case][name] = row
            print(case, name, {k: v for k, v in row.items() if k != "commit"}, flush=True)
        print(case, "floor", f"{rows[case]['floor']['ms']:.3f} ms", flush=True)
        found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
        result = {"machine": found, "shape": shape, "wrong": wrong, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
