"""Host time of eager calls, launch and output allocation included, beside torch's own in one process.

    python benchmarks/host_overhead.py --json FILE

Each number is the median over rounds of the mean microseconds to enqueue one call of a batch, implementations
interleaved.  The device is idle when a batch begins, and a batch is shorter than the launch queue, so the device never
holds the host up.

  kernels           ops whose kernel is ours, under inference_mode: what a replayed call costs
  kernels_with_grad the same calls where an input requires a gradient
  not_replayed      calls that may not be replayed: two inputs at one address, a tensor subclass
  given_to_torch    sizes that `auto` leaves to torch, beside torch's own call: without gradient, with, and the backward
                    of a training step repeated for one forward.  `backends` says what `auto` took.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import mask, ops
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.dispatch import record

BATCH, ROUNDS = 200, 60
Calls = dict[str, Callable[[], object]]


class Subclass(Tensor):
    """A tensor whose ops torch may redefine."""


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "kind": "host_overhead",
        "machine": machine.describe("cuda").to_dict(),
        "commit": commit(),
        **own_kernels(),
        "given_to_torch": given_to_torch(),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def host_us(calls: Calls) -> dict[str, float]:
    """Median over rounds of the mean time to enqueue one call of a batch."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            samples[name].append((time.perf_counter() - start) / BATCH * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in samples.items()}


def randn(*shape: int) -> Tensor:
    """A bf16 tensor on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def own_kernels() -> dict[str, dict[str, float]]:
    """Rows of 4096, a product of 16 rows, attention of 8 heads over 256 tokens of 128."""
    x, residual, y, packed, weight = randn(4, 4096), randn(4, 4096), randn(4, 4096), randn(4, 8192), randn(4096)
    a, b = randn(16, 4096), randn(4096, 4096)
    q, k, v = randn(1, 8, 256, 128), randn(1, 8, 256, 128), randn(1, 8, 256, 128)
    composed = mask.causal() & mask.window(128, 0) | mask.prefix(16)
    subclass = x.as_subclass(Subclass)
    calls: Calls = {
        "tilewright rms_norm": lambda: ops.rms_norm(x, weight),
        "tilewright add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight),
        "tilewright swiglu": lambda: ops.swiglu(x, y),
        "tilewright silu_and_mul": lambda: ops.silu_and_mul(packed),
        "tilewright matmul": lambda: ops.matmul(a, b, backend="cuda"),
        "tilewright fmha": lambda: ops.fmha(q, k, v, causal=True, backend="cuda"),
        "tilewright fmha, composed mask": lambda: ops.fmha(q, k, v, mask=composed, backend="cuda"),
        "torch add": lambda: x + y,
        "torch empty_like": lambda: torch.empty_like(x),
        "torch rms_norm": lambda: F.rms_norm(x, (4096,), weight, 1e-6),
        "torch matmul": lambda: a @ b,
        "torch attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    not_replayed: Calls = {
        "tilewright swiglu(x, x)": lambda: ops.swiglu(x, x),
        "tilewright fmha(q, q, q)": lambda: ops.fmha(q, q, q, causal=True, backend="cuda"),
        "tilewright rms_norm of a subclass": lambda: ops.rms_norm(subclass, weight),
        "torch add of a subclass": lambda: subclass + y,
    }
    result = {}
    with torch.inference_mode():
        result["kernels"] = host_us(calls)
        result["not_replayed"] = host_us(not_replayed)
    for t in (x, weight, a, b, q, k, v):
        t.requires_grad_()
    names = ("tilewright rms_norm", "tilewright swiglu", "tilewright matmul", "tilewright fmha")
    peers = ("torch add", "torch rms_norm", "torch matmul", "torch attention")
    result["kernels_with_grad"] = host_us({name: calls[name] for name in (*names, *peers)})
    return result


def given_to_torch() -> dict[str, dict[str, Any]]:
    """matmul (128, 320) @ (320, 320) and causal attention of 16 heads, 128 tokens of 80, bf16."""
    a, b = randn(128, 320), randn(320, 320)
    q, k, v = randn(1, 16, 128, 80), randn(1, 16, 128, 80), randn(1, 16, 128, 80)
    calls: Calls = {
        "tilewright matmul": lambda: ops.matmul(a, b),
        "torch matmul": lambda: a @ b,
        "tilewright fmha": lambda: ops.fmha(q, k, v, causal=True),
        "torch attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    result: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        result["call"] = host_us(calls)
    for t in (a, b, q, k, v):
        t.requires_grad_()
    result["call_with_grad"] = host_us(calls)
    with record() as recording:
        backwards = {
            name: backward_call(call, (a, b) if "matmul" in name else (q, k, v)) for name, call in calls.items()
        }
        for call in backwards.values():
            call()
    result["backward"] = host_us(backwards)
    result["backends"] = {f"{plan.op}_{plan.direction}": plan.backend for plan in recording.plans}
    return result


def backward_call(call: Callable[[], Any], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """A call that differentiates one forward, kept for the next."""
    output = call()
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def show(result: dict[str, Any]) -> None:
    """Print the times, in microseconds."""
    for column in ("kernels", "kernels_with_grad", "not_replayed"):
        print(column)
        for name, us in result[column].items():
            print(f"  {name:36}{us:8.2f}")
    torchs = result["given_to_torch"]
    print(f"given to torch: {torchs['backends']}")
    for name in torchs["call"]:
        without, with_grad, backward = (torchs[column][name] for column in ("call", "call_with_grad", "backward"))
        print(f"  {name:36}{without:8.2f}{with_grad:10.2f} with grad{backward:10.2f} backward")


if __name__ == "__main__":
    main()
