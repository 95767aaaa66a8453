"""k_grouped_matmul in Triton: `engines/k_triton.py`."""

from tilewright.ops.grouped.engines import k_triton
from tilewright.ops.grouped.registration import register_along_k

register_along_k("triton", k_triton)
