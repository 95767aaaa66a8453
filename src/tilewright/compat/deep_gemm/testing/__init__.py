"""DeepGEMM's tools for tests: comparisons, byte counts, two ways to time a call, and filters of tests."""

from typing import NoReturn

from tilewright.compat.deep_gemm import absent
from tilewright.compat.deep_gemm.testing.bench import bench, bench_kineto
from tilewright.compat.deep_gemm.testing.filters import get_arch_major, ignore_env, test_filter
from tilewright.compat.deep_gemm.testing.numeric import assert_bitwise_equal, calc_diff, count_bytes

__all__ = [
    "assert_bitwise_equal",
    "bench",
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "get_arch_major",
    "ignore_env",
    "test_filter",
]


def __getattr__(name: str) -> NoReturn:
    raise absent.missing(__name__, name, __all__)
