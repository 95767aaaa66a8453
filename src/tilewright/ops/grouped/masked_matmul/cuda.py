"""masked_matmul in CUDA C++ for Hopper: `engines/rows_cuda.py` on the first rows of each matrix of a batch."""

from tilewright.ops.grouped.engines import rows_cuda
from tilewright.ops.grouped.registration import register_rows

register_rows("masked_matmul", "cuda", rows_cuda)
