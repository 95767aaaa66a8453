"""The persistent GEMM kernel in cuTile: tiles in bands, a loop along K, the epilogue on the accumulator in registers.

tileiras makes the pipeline of it: one warp group of 128 threads loads through the copy engine, the others multiply
(HGMMA, and QGMMA for float8, on sm_90), and the store of one tile overlaps the loads of the next.  Operands come as
they are stored; a tile that is needed transposed is loaded with its axes swapped, which the matrix unit reads from
shared memory as it is for 16-bit types.  Beyond an edge loads give 0, and stores write nothing.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel

RELU, GELU, SILU, SWIGLU = range(1, 5)  # places in operands.ACTIVATIONS: constants of a kernel are numbers
LOG2E = 1.4426950408889634
TWO_SQRT_2_OVER_PI = 1.5957691216057308
GELU_CUBIC = 0.044715


def _gemm_kernel(
    d, a, b, bias, c, scale, alpha, band,  # d, c: (B, M, N_out)   a: (B, M, K)   b: (B, K, N)   bias: (N,)
    A_TURNED: ct.Constant[bool], B_TURNED: ct.Constant[bool], BIAS: ct.Constant[bool], ADD: ct.Constant[bool],
    SCALED: ct.Constant[bool], ACTIVATION: ct.Constant[int], FAST_ACC: ct.Constant[bool], SWAP: ct.Constant[bool],
    BY_COPY: ct.Constant[bool],
    BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int], BLOCK_K: ct.Constant[int], SLICE_N: ct.Constant[int],
):  # fmt: skip
    # A turned operand is stored with its last two axes swapped.  Where an argument is not wanted, d stands in for it.
    columns = b.shape[1] if B_TURNED else b.shape[2]
    depth = a.shape[1] if A_TURNED else a.shape[2]
    tiles_m, tiles_n = ct.cdiv(d.shape[1], BLOCK_M), ct.cdiv(columns, BLOCK_N)
    factor = alpha
    if SCALED:
        factor = alpha * ct.load(scale, (0,), shape=())
    for tile in range(ct.bid(0), d.shape[0] * tiles_m * tiles_n, ct.num_blocks(0)):
        z, place = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
        # Bands of `band` rows of tiles, each walked column by column: tiles in flight together share operands in L2
        first = place // (band * tiles_n) * band
        rows = min(tiles_m - first, band)
        m, n = first + place % (band * tiles_n) % rows, place % (band * tiles_n) // rows
        if SWAP:  # the matrix unit takes 64 rows or more: with fewer, columns of b stand where rows of a would
            acc = ct.zeros((BLOCK_N, BLOCK_M), ct.float32)
            for k in range(ct.cdiv(depth, BLOCK_K)):
                left = _load(b, z, n, k, BLOCK_N, BLOCK_K, not B_TURNED)
                right = _load(a, z, k, m, BLOCK_K, BLOCK_M, not A_TURNED)
                acc = ct.mma(left, right, acc, use_fast_acc=FAST_ACC)
            acc = ct.transpose(acc)
        else:
            acc = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
            for k in range(ct.cdiv(depth, BLOCK_K)):
                left = _load(a, z, m, k, BLOCK_M, BLOCK_K, A_TURNED)
                right = _load(b, z, k, n, BLOCK_K, BLOCK_N, B_TURNED)
                acc = ct.mma(left, right, acc, use_fast_acc=FAST_ACC)
        if SLICE_N < BLOCK_N:  # a slice at a time, from registers: the copy engine would need a whole tile of staging
            for j in ct.static_iter(range(BLOCK_N // SLICE_N)):
                at = n * (BLOCK_N // SLICE_N) + j
                if at * SLICE_N < columns:
                    part = ct.extract(acc, (0, j), (BLOCK_M, SLICE_N)) * factor
                    part = _bias_and_activation(part, bias, at, BIAS, ACTIVATION)
                    part = part.astype(d.dtype).reshape((1, *part.shape))
                    ct.store(d, (z, m, at), part, allow_tma=False)
        else:
            part = _bias_and_activation(acc * factor, bias, n, BIAS, ACTIVATION)
            if ADD:  # c may be d: every element is read by the block that writes it, and needed for what it writes
                part = part + _load(c, z, m, n, part.shape[0], part.shape[1], False).astype(ct.float32)
            ct.store(d, (z, m, n), part.astype(d.dtype).reshape((1, *part.shape)), allow_tma=BY_COPY)


def _load(array, z, row, column, ROWS, COLUMNS, TURNED):
    """Tile (row, column) of matrix z, (ROWS, COLUMNS), stored (COLUMNS, ROWS) if TURNED; 0 beyond the edges."""
    at, shape, padding = (z, row, column), (1, ROWS, COLUMNS), ct.PaddingMode.ZERO
    if TURNED:
        return ct.load(array, at, shape, order=(0, 2, 1), padding_mode=padding).reshape((ROWS, COLUMNS))
    return ct.load(array, at, shape, padding_mode=padding).reshape((ROWS, COLUMNS))


def _bias_and_activation(part, bias, n, BIAS, ACTIVATION):
    """act(part + bias) for columns n * COLUMNS to (n + 1) * COLUMNS; "swiglu" makes one column of each two."""
    ROWS, COLUMNS = part.shape
    if BIAS:
        places = n * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
        part = part + ct.gather(bias, (places,)).astype(ct.float32)[None, :]
    if ACTIVATION == RELU:
        return ct.where(part < 0.0, 0.0, part)  # NaN stays
    if ACTIVATION == GELU:  # x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u)
        return part * _sigmoid(part * (TWO_SQRT_2_OVER_PI + TWO_SQRT_2_OVER_PI * GELU_CUBIC * part * part))
    if ACTIVATION == SILU:
        return part * _sigmoid(part)
    if ACTIVATION == SWIGLU:  # neighbours lie in one thread's registers: nothing is exchanged
        pairs = part.reshape((ROWS, COLUMNS // 2, 2))
        gate = ct.extract(pairs, (0, 0, 0), (ROWS, COLUMNS // 2, 1)).reshape((ROWS, COLUMNS // 2))
        up = ct.extract(pairs, (0, 0, 1), (ROWS, COLUMNS // 2, 1)).reshape((ROWS, COLUMNS // 2))
        return gate * _sigmoid(gate) * up
    return part


def _sigmoid(x):
    """1 / (1 + e^-x), 0 where e^-x overflows."""
    e = ct.exp2(x * -LOG2E, flush_to_zero=True)
    return ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


kernel = CutileKernel(_gemm_kernel)
