"""The persistent GEMM kernel in cuTile: tiles in grouped order, a loop along K, the epilogue in registers.

tileiras builds the pipeline: one warpgroup loads through TMA, the others multiply (HGMMA, and QGMMA for float8, on
sm_90), and the store of one tile overlaps the loads of the next.  A transposed operand is loaded with its axes swapped;
for 16-bit types the tensor cores read it from shared memory without a copy.  Loads beyond an edge give 0, and stores
write nothing.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel

RELU, GELU, SILU, SWIGLU = range(1, 5)  # indices in operands.ACTIVATIONS: constants of a kernel are numbers
LOG2E = 1.4426950408889634
TWO_SQRT_2_OVER_PI = 1.5957691216057308
GELU_CUBIC = 0.044715


def _gemm_kernel(
    d, a, b, bias, c, scale, alpha, group_m,  # d, c: (B, M, N_out)   a: (B, M, K)   b: (B, K, N)   bias: (N,)
    A_TRANSPOSED: ct.Constant[bool], B_TRANSPOSED: ct.Constant[bool], BIAS: ct.Constant[bool], ADD: ct.Constant[bool],
    SCALED: ct.Constant[bool], ACTIVATION: ct.Constant[int], FAST_ACC: ct.Constant[bool], SWAP: ct.Constant[bool],
    USE_TMA: ct.Constant[bool],
    BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int], BLOCK_K: ct.Constant[int], SLICE_N: ct.Constant[int],
):  # fmt: skip
    # d = act(alpha * scale * a @ b + bias) + c; absent arguments are d, transposed operands have swapped last axes
    N = b.shape[1] if B_TRANSPOSED else b.shape[2]
    K = a.shape[1] if A_TRANSPOSED else a.shape[2]
    tiles_m, tiles_n = ct.cdiv(d.shape[1], BLOCK_M), ct.cdiv(N, BLOCK_N)
    factor = alpha
    if SCALED:
        factor = alpha * ct.load(scale, (0,), shape=())
    for tile in range(ct.bid(0), d.shape[0] * tiles_m * tiles_n, ct.num_blocks(0)):
        # Find the tile in grouped order: group_m tile rows at a time, column by column, for L2 reuse
        batch, tile_index = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
        first_row = tile_index // (group_m * tiles_n) * group_m
        group_size_m = min(tiles_m - first_row, group_m)
        m = first_row + tile_index % (group_m * tiles_n) % group_size_m
        n = tile_index % (group_m * tiles_n) // group_size_m

        # Accumulate along K; SWAP computes the transpose, as the M of an instruction is 64 at least
        if SWAP:
            acc = ct.zeros((BLOCK_N, BLOCK_M), ct.float32)
            for k_block in range(ct.cdiv(K, BLOCK_K)):
                left = _load(b, batch, n, k_block, BLOCK_N, BLOCK_K, not B_TRANSPOSED)
                right = _load(a, batch, k_block, m, BLOCK_K, BLOCK_M, not A_TRANSPOSED)
                acc = ct.mma(left, right, acc, use_fast_acc=FAST_ACC)
            acc = ct.transpose(acc)
        else:
            acc = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
            for k_block in range(ct.cdiv(K, BLOCK_K)):
                left = _load(a, batch, m, k_block, BLOCK_M, BLOCK_K, A_TRANSPOSED)
                right = _load(b, batch, k_block, n, BLOCK_K, BLOCK_N, B_TRANSPOSED)
                acc = ct.mma(left, right, acc, use_fast_acc=FAST_ACC)

        # Epilogue; slices are stored from registers, as TMA would need shared memory for a whole tile
        if SLICE_N < BLOCK_N:
            for j in ct.static_iter(range(BLOCK_N // SLICE_N)):
                slice_n = n * (BLOCK_N // SLICE_N) + j
                if slice_n * SLICE_N < N:
                    out = ct.extract(acc, (0, j), (BLOCK_M, SLICE_N)) * factor
                    out = _bias_and_activation(out, bias, slice_n, BIAS, ACTIVATION)
                    out = out.astype(d.dtype).reshape((1, *out.shape))
                    ct.store(d, (batch, m, slice_n), out, allow_tma=False)
        else:
            out = _bias_and_activation(acc * factor, bias, n, BIAS, ACTIVATION)
            if ADD:  # c may be d: each element is read by the block that then writes it
                out = out + _load(c, batch, m, n, out.shape[0], out.shape[1], False).astype(ct.float32)
            ct.store(d, (batch, m, n), out.astype(d.dtype).reshape((1, *out.shape)), allow_tma=USE_TMA)


def _load(array, batch, row, column, ROWS, COLUMNS, TRANSPOSED):
    """Loads tile (row, column), (ROWS, COLUMNS), which is stored (COLUMNS, ROWS) if TRANSPOSED; 0 beyond the edges."""
    index, shape, padding = (batch, row, column), (1, ROWS, COLUMNS), ct.PaddingMode.ZERO
    if TRANSPOSED:
        return ct.load(array, index, shape, order=(0, 2, 1), padding_mode=padding).reshape((ROWS, COLUMNS))
    return ct.load(array, index, shape, padding_mode=padding).reshape((ROWS, COLUMNS))


def _bias_and_activation(x, bias, n, BIAS, ACTIVATION):
    """Returns act(x + bias) for columns n * COLUMNS to (n + 1) * COLUMNS; "swiglu" makes one column of each two."""
    ROWS, COLUMNS = x.shape
    if BIAS:
        index = n * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
        x = x + ct.gather(bias, (index,)).astype(ct.float32)[None, :]
    if ACTIVATION == RELU:
        return ct.where(x < 0.0, 0.0, x)  # NaN stays
    if ACTIVATION == GELU:  # x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u)
        return x * _sigmoid(x * (TWO_SQRT_2_OVER_PI + TWO_SQRT_2_OVER_PI * GELU_CUBIC * x * x))
    if ACTIVATION == SILU:
        return x * _sigmoid(x)
    if ACTIVATION == SWIGLU:  # pairs are in registers of one thread: no shuffles
        pairs = x.reshape((ROWS, COLUMNS // 2, 2))
        gate = ct.extract(pairs, (0, 0, 0), (ROWS, COLUMNS // 2, 1)).reshape((ROWS, COLUMNS // 2))
        up = ct.extract(pairs, (0, 0, 1), (ROWS, COLUMNS // 2, 1)).reshape((ROWS, COLUMNS // 2))
        return gate * _sigmoid(gate) * up
    return x


def _sigmoid(x):
    """Returns 1 / (1 + e^-x); 0 where e^-x overflows."""
    e = ct.exp2(x * -LOG2E, flush_to_zero=True)
    return ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


kernel = CutileKernel(_gemm_kernel)
