"""grouped_matmul in CUDA C++ for Hopper: `engines/rows_cuda.py` on groups of rows of one matrix."""

from tilewright.ops.gemm.grouped.registration import register_rows
from tilewright.ops.gemm.kernels.sm90 import rows_cuda

register_rows("grouped_matmul", "cuda", rows_cuda)
