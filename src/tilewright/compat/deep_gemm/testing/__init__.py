"""DeepGEMM's tools for tests: a similarity, byte counts, and two ways to time a call on the GPU."""

from tilewright.compat.deep_gemm.testing.bench import bench, bench_kineto
from tilewright.compat.deep_gemm.testing.numeric import calc_diff, count_bytes

__all__ = ["bench", "bench_kineto", "calc_diff", "count_bytes"]


def __getattr__(name: str) -> object:
    raise AttributeError(f"tilewright.compat.deep_gemm.testing has no {name!r}. It has: {', '.join(__all__)}.")
