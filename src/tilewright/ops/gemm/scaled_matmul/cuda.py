"""scaled_matmul in CUDA C++ for Hopper: a batch of one for `engines/hopper_fp8_cuda.py`."""

from tilewright.ops.gemm.kernels.sm90 import hopper_fp8_cuda
from tilewright.ops.gemm.scaled_registration import register_scaled_matmul

register_scaled_matmul("cuda", hopper_fp8_cuda)
