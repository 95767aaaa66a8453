"""masked_matmul in CUDA C++ for Hopper: `engines/rows_cuda.py` on the first rows of each matrix of a batch."""

from tilewright.ops.gemm.grouped.registration import register_rows
from tilewright.ops.gemm.kernels.sm90 import rows_cuda

register_rows("masked_matmul", "cuda", rows_cuda)
