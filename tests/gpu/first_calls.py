"""`python -m tests.gpu.first_calls BACKEND OP...`: eight new threads make the first calls of kernels together.

For the tests beside it, in a process of its own: these threads have loaded no kernel, made no stream known and not used
the device before.  Half of the threads use the default stream, the others one of their own.  What each of them got,
outputs and gradients, is compared with the reference in the same dtype.  Prints a line a fault; exits with 1 if there
is one.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

import tilewright.ops
from tilewright.dispatch import Contract, Sample, contract
from tilewright.dispatch.effects import pure
from tilewright.errors import BackendError
from tilewright.validate.bits import replicas
from tilewright.validate.oracle import differentiate, gradient_inputs

THREADS, CASES = 8, 3
FEW_ROWS = {"M": 4, "N": 1024, "K": 2048}


def problems(op: Contract) -> Iterator[Sample]:
    """A few samples: edge cases, and of a product few rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    if op.name == "matmul":
        yield op.inputs(FEW_ROWS, torch.bfloat16, device, 0)
    for workload in op.edge_cases:
        yield op.inputs(workload.params, op.dtypes[0], device, 0)


def runs(op: Contract, sample: Sample, backend: str) -> bool:
    """Would `backend` take it?  Asks the plan alone: nothing is compiled, loaded or launched."""
    try:
        tilewright.explain(op.name, *sample.args, **sample.kwargs, backend=backend)
    except BackendError:
        return False
    return True


def call(op: Contract, sample: Sample, backend: str, cotangents: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of one call."""
    positions = gradient_inputs(op, sample)
    if not positions:
        with torch.no_grad():
            return [*pure(op, partial(op.function, backend=backend))(*sample.args, **sample.kwargs)]
    outputs, grads = differentiate(
        lambda *args, **kwargs: op.function(*args, **kwargs, backend=backend), sample, positions, cotangents
    )
    return [*outputs, *(g for g in grads.values() if g is not None)]


def together(op: Contract, sample: Sample, backend: str) -> list[str]:
    """Faults of eight threads that make one call at once."""
    with torch.no_grad():
        wanted = pure(op, op.reference)(*sample.args, **sample.kwargs)
    cotangents = [torch.randn_like(o, dtype=torch.float32).to(o.dtype) for o in wanted]
    copies = [(replicas(Sample(sample.args, dict(sample.kwargs)).args), replicas(cotangents)) for _ in range(THREADS)]
    torch.cuda.synchronize()
    barrier = threading.Barrier(THREADS)

    def work(i: int) -> list[Tensor]:
        args, grads = copies[i]
        barrier.wait(timeout=300)
        stream = torch.cuda.Stream() if i % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            made = call(op, Sample(args, sample.kwargs), backend, grads)
            stream.synchronize()
        return made

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(work, i) for i in range(THREADS)]
    exact = call(op, sample, "torch", cotangents)
    faults = []
    for i, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            faults.append(f"thread {i}: {type(error).__name__}: {error}")
            continue
        for j, (ours, theirs) in enumerate(zip(future.result(), exact, strict=True)):
            scale = theirs.double().nan_to_num(0, 0, 0).norm().clamp_min(1e-6)
            off = float((ours.double() - theirs.double()).nan_to_num(0).norm() / scale)
            if not off < 0.05:
                faults.append(f"thread {i}: result {j} is off by {off:.3g} of its norm")
    return faults


def main(backend: str, names: list[str]) -> int:
    """Print the faults; how many there are."""
    count = wrong = 0
    for name in names:
        op = contract(name)
        taken = [sample for sample in problems(op) if runs(op, sample, backend)][:CASES]
        for i, sample in enumerate(taken):
            faults = together(op, sample, backend)
            count, wrong = count + 1, wrong + len(faults)
            print(*(f"{name}[{backend}] {i}: {fault}" for fault in faults), sep="\n", flush=True)
    print(f"{count} first calls by {THREADS} threads, {wrong} faults")
    return wrong if count >= len(names) else 1


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], sys.argv[2:])))
