"""scaled_matmul_fp8 in Triton: a batch of one for `engines/scaled_triton.py`, which casts in a second launch."""

from tilewright.ops.gemm.kernels.triton import scaled as scaled_triton
from tilewright.ops.gemm.scaled_registration import register_scaled_matmul_fp8

register_scaled_matmul_fp8("triton", scaled_triton)
