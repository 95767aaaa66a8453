"""k_grouped_matmul in Triton: `engines/k_triton.py`."""

from tilewright.ops.gemm.grouped.registration import register_along_k
from tilewright.ops.gemm.kernels.triton import k_grouped as k_triton

register_along_k("triton", k_triton)
