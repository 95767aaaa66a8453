"""Is the time of sparse attention proportional to the tiles that its mask leaves?

    python benchmarks/attention_tiles.py --json FILE [--rounds 20]

One sequence of 32 heads over 8, D = 128, bf16; causal attention and sparse masks of the same length in turn, round by
round, in one process, with our kernels and with FlexAttention.  tiles: of 128 queries by 128 keys, over all heads, with
a pair that the mask allows.  per_tile: microseconds a tile and multiprocessor; `of_causal`: per_tile beside that of
causal attention, whose tiles are nearly all full; 1 is proportional.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import flex_attention

from tilewright import mask, ops
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.bench.timing import interleave
from tilewright.dispatch import record
from tilewright.mask.tables import tile_table
from tilewright.ops.attention.fmha.samples import documents

HEADS, KV_HEADS, D, TILE = 32, 8, 128, 128
DEVICE = torch.device("cuda")


def packed(count, length):
    """`count` documents of random lengths, each causal."""
    starts = documents(count, length).diff().nonzero().flatten() + 1
    cu_seqlens = torch.cat((torch.tensor([0]), starts, torch.tensor([length]))).int()
    return mask.document(cu_seqlens=cu_seqlens, length=length) & mask.causal()


SIZES = {
    32768: {
        "causal": mask.causal(),
        "window 1024": mask.window(1023),
        "window 4096": mask.window(4095),
        "16 documents": packed(16, 32768),
        "64 documents": packed(64, 32768),
        "64 documents by id": mask.document(documents(64, 32768)) & mask.causal(),
    },
    65536: {"causal": mask.causal(), "window 4096": mask.window(4095)},
}


def backward_of(o, do, inputs):
    """The gradients, again and again for one forward."""
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def calls_of(seen, q, k, v, do, flex):
    """{(direction, whose): call}, and {direction: backend of ours}."""
    block_mask = seen.to_block_mask(1, 1, q.shape[2], k.shape[2], DEVICE)
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with record() as recording:
        made = ops.fmha(*inputs, mask=seen)
        torch.autograd.grad(made, inputs, do, retain_graph=True)
    by_flex = flex(*inputs, block_mask=block_mask, enable_gqa=True)
    calls = {
        ("fwd", "tilewright"): lambda: ops.fmha(q, k, v, mask=seen),
        ("fwd", "flex"): lambda: flex(q, k, v, block_mask=block_mask, enable_gqa=True),
        ("bwd", "tilewright"): backward_of(made, do, inputs),
        ("bwd", "flex"): backward_of(by_flex, do, inputs),
    }
    return calls, {plan.direction: plan.backend for plan in recording.plans}


def measure(length, masks, rounds):
    """A row for each mask, direction and implementation."""
    g = torch.Generator(device=DEVICE).manual_seed(length)
    q, k, v, do = (
        torch.randn(1, heads, length, D, device=DEVICE, dtype=torch.bfloat16, generator=g)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    torch._dynamo.config.recompile_limit = 64  # a mask is a compilation
    flex = torch.compile(flex_attention, dynamic=False)
    calls, backends, tiles = {}, {}, {}
    for name, seen in masks.items():
        found, backends[name] = calls_of(seen, q, k, v, do, flex)
        calls |= {(name, *key): call for key, call in found.items()}
        tiles[name] = HEADS * int(tile_table(seen, 1, 1, length, length, TILE, TILE, device=DEVICE).counts.sum())
    samples = interleave(calls, device=DEVICE, rounds=rounds)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    us = {key: found.median for key, found in samples.items()}
    per_tile = {key: us[key] * processors / tiles[key[0]] for key in us}
    return [
        {
            "S": length,
            "mask": name,
            "direction": direction,
            "by": who,
            "tiles": tiles[name],
            "backend": backends[name][direction] if who == "tilewright" else None,
            "us": round(us[name, direction, who], 1),
            "per_tile": round(per_tile[name, direction, who], 4),
            "of_causal": round(per_tile[name, direction, who] / per_tile["causal", direction, who], 3),
            "ratio": round(us[name, direction, "flex"] / us[name, direction, who], 3),
            "commit": commit(),
        }
        for name, direction, who in calls
    ]


def main():
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for length, masks in SIZES.items():
        rows += measure(length, masks, options.rounds)
        found = {"kind": "attention_tiles", "machine": machine.describe(DEVICE).to_dict(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        print(*row.values(), sep="  ")


if __name__ == "__main__":
    main()
