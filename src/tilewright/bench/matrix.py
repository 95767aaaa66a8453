"""The matrix rate of this run, reached by the vendor's library: the ceiling of compute-bound rows.

Unlike memory bandwidth it is not a physical limit: another kernel may beat the library at every size tried here. Hence
the best of a few sizes, and a wide margin (`SHARE`) before a row is called miscounted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.bench.timing import interleave

SHARE = 0.8  # of the floor: a row below it has wrong flops or timing
_GPU_SIZES = ((4096, 4096, 4096), (4096, 16384, 4096), (8192, 8192, 8192))  # M, N, K: full waves, long sums
_CPU_SIZES = ((256, 256, 256), (1024, 1024, 1024))


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Flops per microsecond of the fastest of a few products of `dtype`, timed back to back.

    Uses medians; on a CPU, which other processes share, the fastest samples: see `bandwidth.floor_us`.
    """
    on_gpu = device.type == "cuda"
    sizes = _GPU_SIZES if on_gpu else _CPU_SIZES
    with torch.inference_mode():
        calls = {f"{m}x{n}x{k}": _product(m, n, k, dtype, device) for m, n, k in sizes}
        timed = interleave(calls, device=device, rounds=7, warmup=2)
    us = [samples.median if on_gpu else min(samples.us) for samples in timed.values()]
    return max(2 * m * n * k / each for (m, n, k), each in zip(sizes, us, strict=True))


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    if dtype == torch.int8 and device.type == "cuda":
        a, b = (torch.randint(-128, 128, (rows, k), dtype=dtype, device=device) for rows in (m, n))
        return lambda: torch._int_mm(a, b.T)
    if dtype == torch.int8:
        dtype = torch.float64  # in which a CPU adds exactly
    a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    if dtype.itemsize > 1:
        return lambda: a @ b.T
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
