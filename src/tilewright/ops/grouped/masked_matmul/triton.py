"""masked_matmul in Triton: `engines/rows_triton.py`."""

from tilewright.ops.grouped.engines import rows_triton
from tilewright.ops.grouped.registration import register_rows

register_rows("masked_matmul", "triton", rows_triton, any_out=True)
