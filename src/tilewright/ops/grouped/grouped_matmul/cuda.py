"""grouped_matmul in CUDA C++ for Hopper: `engines/rows_cuda.py` on groups of rows of one matrix."""

from tilewright.ops.grouped.engines import rows_cuda
from tilewright.ops.grouped.registration import register_rows

register_rows("grouped_matmul", "cuda", rows_cuda)
