"""matmul in Triton: a batch of one for `engines/tile_triton.py`."""

from tilewright.ops.gemm.kernels.triton import dense as tile_triton
from tilewright.ops.gemm.registration import register_matmul

register_matmul("triton", tile_triton)
