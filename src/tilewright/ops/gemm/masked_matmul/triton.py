"""masked_matmul in Triton: `engines/rows_triton.py`."""

from tilewright.ops.gemm.grouped.registration import register_rows
from tilewright.ops.gemm.kernels.triton import grouped_rows as rows_triton

register_rows("masked_matmul", "triton", rows_triton, any_out=True)
