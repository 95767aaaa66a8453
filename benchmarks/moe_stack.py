"""A stack of layers of Qwen3-30B-A3B's shape, decoding and prefilling: transformers' forms of experts beside ours.

    python benchmarks/moe_stack.py --json FILE                                              # a GPU
    python benchmarks/moe_stack.py --json FILE --device cpu --layers 1 --width 64 --inner 32  # a CPU: does it run?

One model with random weights; its layers without the head, as the head is the same in every form.  Forms, interleaved
in one process on the same weights:
  eager, batched_mm, grouped_mm   transformers' experts, by `set_experts_implementation`
  patched                         `tilewright.patch(model)`: experts, routers, norms, rotary embeddings
  patched_attention               the same, and decoding steps attend by `ops.fmha_decode`
A decoding step reads transformers' static cache of `--context` tokens; a prefill has no cache.  `graph` is the time of
a CUDA graph of the call, `launched` the wall time launch by launch; `eager` asks the host which experts have tokens, so
it has no graph.  `ratio` is the best form of transformers over ours.  `difference` is relative, from grouped_mm, both
in bf16: a token whose router nearly ties may go to another expert.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_8b import fill
from llama_variants import shared_copy

import tilewright
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.timing import interleave
from tilewright.hardware.graph_capture import captured
from tilewright.models import register_attention
from tilewright.models.attention.step import step_mask

FORMS = ("eager", "batched_mm", "grouped_mm", "patched", "patched_attention")
OURS = ("patched", "patched_attention")
MOST_BATCHED, MOST_EAGER = 64, 64  # tokens: batched_mm copies the weights of every slot, eager loops over experts
_ROOM = 64
Call = Callable[[], torch.Tensor]


def build(options: argparse.Namespace) -> Any:
    """The stack in bf16, made where it will live."""
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    heads = max(4, options.width // 64)
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=options.width, intermediate_size=3 * options.width,
        moe_intermediate_size=options.inner, num_hidden_layers=options.layers, num_attention_heads=heads,
        num_key_value_heads=4, head_dim=128, num_experts=options.experts, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=8192,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(options.device), torch.no_grad():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeModel(config).eval()
        torch.set_default_dtype(default)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    return model


def decoding(model: Any, batch: int, context: int) -> Call:
    """A step over a static cache of random numbers, always at the same position."""
    from transformers import StaticCache

    device, config, room = model.device, model.config, context + _ROOM
    cache = StaticCache(config, max_cache_len=room)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, device)
    for number, layer in enumerate(cache.layers):
        fill(layer.keys, 2 * number)
        fill(layer.values, 2 * number + 1)
    tokens = (torch.arange(batch, device=device) % config.vocab_size)[:, None]
    position = torch.full((1,), context, dtype=torch.int64, device=device)
    plain = (torch.arange(room, device=device) <= position).expand(batch, 1, 1, room)
    ours = model.config._attn_implementation != "sdpa"

    def step() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
        mask = step_mask(batch, room, position[0], None, device) if ours else None
        hidden: torch.Tensor = model(
            input_ids=tokens,
            attention_mask=plain if mask is None else mask,
            position_ids=position.expand(batch, 1),
            past_key_values=cache,
        ).last_hidden_state
        return hidden

    return step


def prefilling(model: Any, length: int) -> Call:
    """A forward of so many tokens without a cache."""
    tokens = (torch.arange(length, device=model.device) * 7 % model.config.vocab_size)[None]

    def prefill() -> torch.Tensor:
        hidden: torch.Tensor = model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    return prefill


def graph_of(call: Call, device: torch.device) -> Callable[[], None]:
    """The call as a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with captured(graph, device, stream=stream):
        call()
    torch.cuda.synchronize(device)
    return graph.replay


@torch.inference_mode()
def measured(
    models: dict[str, Any], make: Callable[[Any], Call], tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of every form, and the ratios.   models: "plain" and ours, on the same weights."""
    device = torch.device(options.device)
    most = {"batched_mm": MOST_BATCHED, "eager": MOST_EAGER}
    row: dict[str, Any] = {"graph_ms": {}, "launched_ms": {}, "failed": {}}
    graphs: dict[str, Callable[[], None]] = {}
    outputs: dict[str, torch.Tensor] = {}
    theirs = make(models["plain"])
    for form in FORMS:
        if tokens > most.get(form, tokens):
            continue
        call = make(models[form]) if form in OURS else theirs
        if form not in OURS:
            models["plain"].set_experts_implementation(form)
        try:
            outputs[form] = call().float()
            if device.type == "cuda":
                if form != "eager":
                    graphs[form] = graph_of(call, device)
                samples = interleave({form: call}, device=device, rounds=8, warmup=2, measure="wall", limit_s=0.4)
                row["launched_ms"][form] = samples[form].median / 1e3
        except (RuntimeError, TypeError, ValueError) as error:  # a form that cannot run here is told as such
            row["failed"][form] = f"{type(error).__name__}: {str(error)[:200]}"
    if graphs:
        for form, samples in interleave(graphs, device=device, rounds=options.rounds, limit_s=1.5).items():
            row["graph_ms"][form] = samples.median / 1e3
    for kind in ("graph", "launched"):
        times = row[f"{kind}_ms"]
        theirs_ms = [ms for form, ms in times.items() if form not in OURS]
        row[f"{kind}_ratio"] = {form: min(theirs_ms) / times[form] for form in OURS if form in times and theirs_ms}
    if "patched" in outputs and "grouped_mm" in outputs:
        wanted = outputs["grouped_mm"]
        row["difference"] = float((outputs["patched"] - wanted).norm() / wanted.norm())
    return row


def main() -> None:
    """Measure every case, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prefills", default="2048,8192")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    plain = build(options)
    patched = shared_copy(plain)
    report = str(tilewright.patch(patched, verify=False).report())
    attending = shared_copy(patched)
    attending.set_attn_implementation(register_attention())
    models = {"plain": plain, "patched": patched, "patched_attention": attending}
    cases: list[tuple[str, int, Callable[[Any], Call]]] = []
    for batch in map(int, options.batches.split(",")):
        cases.append((f"decode batch {batch}", batch, partial(decoding, batch=batch, context=options.context)))
    for length in map(int, options.prefills.split(",")):
        cases.append((f"prefill {length}", length, partial(prefilling, length=length)))
    sizes = {k: getattr(options, k) for k in ("layers", "width", "inner", "experts", "context")}
    result: dict[str, Any] = {
        "kind": "stack_moe",
        "commit": commit(),
        "sizes": sizes,
        "report": report.splitlines(),
        "cases": {},
    }
    if options.device != "cpu":
        device, before = torch.device(options.device), machine.clocks(options.device)
        result["machine"] = machine.describe(device, before=before, after=before).to_dict()
    for name, tokens, make in cases:
        result["cases"][name] = row = measured(models, make, tokens, options)
        print(name, json.dumps(row), flush=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
