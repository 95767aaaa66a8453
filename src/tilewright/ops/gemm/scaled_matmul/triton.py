"""scaled_matmul in Triton: a batch of one for `engines/scaled_triton.py`."""

from tilewright.ops.gemm.kernels.triton import scaled as scaled_triton
from tilewright.ops.gemm.scaled_registration import register_scaled_matmul

register_scaled_matmul("triton", scaled_triton)
