"""k_grouped_matmul in CUDA C++ for Hopper: `engines/k_cuda.py`."""

from tilewright.ops.gemm.grouped.registration import register_along_k
from tilewright.ops.gemm.kernels.sm90 import k_cuda

register_along_k("cuda", k_cuda)
