"""matmul in cuTile: a batch of one for `engines/tile_cutile.py`."""

from tilewright.ops.gemm.kernels.cutile import dense as tile_cutile
from tilewright.ops.gemm.registration import register_matmul

register_matmul("cutile", tile_cutile)
