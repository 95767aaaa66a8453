"""DeepGEMM's names on top of `tilewright.ops`: `from tilewright.compat import deep_gemm` instead of `import deep_gemm`.

What differs is listed in docs/compat.md. A name that is not here raises AttributeError and says which ones are.
"""

from typing import NoReturn

from tilewright.compat.deep_gemm import testing
from tilewright.compat.deep_gemm.gemm import bf16_gemm_nn, bf16_gemm_nt, bf16_gemm_tn, bf16_gemm_tt
from tilewright.compat.deep_gemm.sizes import align, ceil_div, get_tma_aligned_size
from tilewright.compat.deep_gemm.sms import get_num_sms, set_num_sms
from tilewright.compat.deep_gemm.testing import bench, bench_kineto, calc_diff, count_bytes

__all__ = [
    "align",
    "bench",
    "bench_kineto",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "get_num_sms",
    "get_tma_aligned_size",
    "set_num_sms",
    "testing",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"tilewright.compat.deep_gemm has no {name!r}. It has: {', '.join(__all__)}.")
