"""bmm in Triton: `engines/tile_triton.py`, whose tiles are numbered through all products of the batch."""

from tilewright.ops.gemm.kernels.triton import dense as tile_triton
from tilewright.ops.gemm.registration import register_bmm

register_bmm("triton", tile_triton)
