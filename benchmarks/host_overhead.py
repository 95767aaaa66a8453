"""Host time of one eager call, launch and output allocation included, beside what aten itself takes on the same
machine.

    python benchmarks/host_overhead.py --json FILE

Times the enqueueing of calls on 4x4096 bf16, where the GPU is faster than the host, so the queue never fills: best of
many short batches, interleaved, in microseconds.  `call`: nothing needs a gradient, under inference_mode.
`call_with_grad`: an input does.

`given_to_torch`: the same for sizes that no table has, which `auto` leaves to torch, beside torch's own call; and
`backward`, of a training step, again and again for one forward.  `backends` says what `auto` took.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.bench import machine
from tilewright.bench.commit import commit
from tilewright.dispatch import record

BATCH, ROUNDS = 200, 60


def host_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
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


def given_to_torch() -> dict[str, dict[str, Any]]:
    """matmul (128, 320) @ (320, 320) and causal attention of 16 heads, 128 tokens of 80, bf16."""
    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((128, 320), (320, 320)))
    q, k, v = (torch.randn(1, 16, 128, 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Callable[[], Any]] = {
        "tilewright matmul": lambda: ops.matmul(a, b),
        "torch matmul": lambda: a @ b,
        "tilewright fmha": lambda: ops.fmha(q, k, v, causal=True),
        "torch attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    inputs = {name: (a, b) if "matmul" in name else (q, k, v) for name in calls}
    found: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        found["call"] = host_us(calls)
    for t in (a, b, q, k, v):
        t.requires_grad_()
    found["call_with_grad"] = host_us(calls)

    def backward(name: str) -> Callable[[], object]:
        made = calls[name]()
        gradient = torch.ones_like(made)
        return lambda: torch.autograd.grad(made, inputs[name], gradient, retain_graph=True)

    with record() as recording:
        backwards = {name: backward(name) for name in calls}
        for call in backwards.values():
            call()
    found["backward"] = host_us(backwards)
    found["backends"] = {f"{plan.op}_{plan.direction}": plan.backend for plan in recording.plans}
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    x, residual, y = (torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    packed = torch.randn(4, 8192, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "tilewright rms_norm": lambda: ops.rms_norm(x, weight),
        "tilewright add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight),
        "tilewright swiglu": lambda: ops.swiglu(x, y),
        "tilewright silu_and_mul": lambda: ops.silu_and_mul(packed),
        "aten add": lambda: x + y,
        "aten rms_norm": lambda: F.rms_norm(x, (4096,), weight, 1e-6),
        "aten empty_like": lambda: torch.empty_like(x),
    }
    with torch.inference_mode():
        plain = host_us(calls)
    x.requires_grad_()
    weight.requires_grad_()
    with_grad = host_us(
        {name: calls[name] for name in ("tilewright rms_norm", "tilewright swiglu", "aten add", "aten rms_norm")}
    )
    torchs = given_to_torch()
    found = {
        "kind": "host_overhead",
        "machine": machine.describe("cuda").to_dict(),
        "commit": commit(),
        "call": plain,
        "call_with_grad": with_grad,
        "given_to_torch": torchs,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, us in plain.items():
        print(f"{name:26}{us:8.2f} us" + (f"{with_grad[name]:10.2f} us with grad" if name in with_grad else ""))
    print(f"given to torch: {torchs['backends']}")
    for name in torchs["call"]:
        times = [torchs[column][name] for column in ("call", "call_with_grad", "backward")]
        print(f"{name:26}{times[0]:8.2f} us{times[1]:10.2f} us with grad{times[2]:10.2f} us backward")


if __name__ == "__main__":
    main()
