"""bmm in cuTile: `engines/tile_cutile.py`, whose tiles are numbered through all products of the batch."""

from tilewright.ops.gemm.kernels.cutile import dense as tile_cutile
from tilewright.ops.gemm.registration import register_bmm

register_bmm("cutile", tile_cutile)
