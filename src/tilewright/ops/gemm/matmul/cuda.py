"""matmul in CUDA C++ for Hopper: a batch of one for `engines/hopper_cuda.py`."""

from tilewright.ops.gemm.kernels.sm90 import hopper_cuda
from tilewright.ops.gemm.registration import register_matmul

register_matmul("cuda", hopper_cuda)
