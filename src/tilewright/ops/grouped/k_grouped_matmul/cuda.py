"""k_grouped_matmul in CUDA C++ for Hopper: `engines/k_cuda.py`."""

from tilewright.ops.grouped.engines import k_cuda
from tilewright.ops.grouped.registration import register_along_k

register_along_k("cuda", k_cuda)
