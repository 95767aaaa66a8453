"""The matrix rate of this run: what the vendor's library reaches, the ceiling that compute-bound rows are held against.

Unlike a stream of bytes it is no law of nature: another kernel may be faster than the library at every size tried
here. Hence the best of a few sizes, and a wide margin (`SHARE`) before a row counts as miscounted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.bench.timing import interleave

SHARE = 0.8  # of the floor; below it not the kernel is good but the flops or the timing are wrong
_GPU_SIZES = ((4096, 4096, 4096), (4096, 16384, 4096), (8192, 8192, 8192))  # M, N, K: full waves, long sums
_CPU_SIZES = ((256, 256, 256), (1024, 1024, 1024))


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Flops per microsecond of the fastest of a few products of `dtype`, timed back to back.

    By their medians, or on a CPU, which other processes share, by their fastest samples: see `bandwidth.floor_us`.
    """
    on_gpu = device.type == "cuda"
    sizes = _GPU_SIZES if on_gpu else _CPU_SIZES
    with torch.inference_mode():
        calls = {f"{m}x{n}x{k}": _product(m, n, k, dtype, device) for m, n, k in sizes}
        timed = interleave(calls, device=device, rounds=7, warmup=2)
    us = [samples.median if on_gpu else min(samples.us) for samples in timed.values()]
    return max(2 * m * n * k / each for (m, n, k), each in zip(sizes, us, strict=True))


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    if dtype.itemsize > 1:
        return lambda: a @ b.T
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
