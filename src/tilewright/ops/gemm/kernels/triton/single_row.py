"""A single row of A (decoding at batch 1) in Triton: the weights are read once, and multiplied by FMAs.

Traffic: N * K elements, 7.2 us for 2112 x 7168 in bf16 at 4.2 TB/s.  Tiles for tensor cores have 64 columns, and few
such tiles do not spread evenly over a GPU; here a program has 2 to 16 columns of op(B).  More rows are correct too, but
each row reads the weights again.
"""

from collections.abc import Iterator
from itertools import product

import triton
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.kernels.triton.single_row_kernel import row_kernel
from tilewright.ops.gemm.kernels.triton.tiles import Config, needs_wide_offsets, vector_width, vector_width_of_c
from tilewright.ops.gemm.operands import Major, major_b

_kernel = TritonKernel(row_kernel)

ELEMENTS = range(16, 65)
"""Elements of B per thread per tile: fewer leave too few loads in flight, more spill next to the accumulators."""


def candidates() -> Iterator[Config]:
    """Yields 32 configs, for weights of any width."""
    for block_n, block_k, warps, stages in product((2, 4, 8, 16), (512, 1024, 2048), (4, 8), (1, 3)):
        if block_n * block_k // (32 * warps) in ELEMENTS:
            yield Config(1, block_n, block_k, warps, stages, 1, False, 1)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    epilogue: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    epilogue_strides: tuple[int, ...],
    activation: str,
    config: Config,
) -> None:
    """Launches the kernel.   epilogue: bias, c, scale, alpha;  epilogue_strides: of the bias, and the three of c."""
    batch, m, k = a.shape
    n, c = b.shape[2], epilogue[1]
    b_along_k = major_b(b) is Major.K
    strides = (*d.stride()[:2], *a.stride(), *b.stride())
    args = (d, a, b, *epilogue, m, n, k, *strides, *epilogue_strides)
    constants = (
        activation, b_along_k, vector_width(a, k), vector_width(b, k if b_along_k else n), vector_width_of_c(c),
        vector_width(d, d.shape[2]), k % config.block_k == 0, needs_wide_offsets(d, a, b, c, reach=config.block_k),
        config.num_stages, config.block_n, config.block_k,
    )  # fmt: skip
    _kernel((batch * m * triton.cdiv(n, config.block_n),), args, constants, num_warps=config.num_warps)
