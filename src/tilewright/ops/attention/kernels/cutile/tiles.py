"""Shared by the cuTile kernels of attention: the tile scheduler, the tiles that a band covers, loads and masks."""

from tilewright.jit.cutile_language import ct

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def schedule_tile(pid, tiles, x, chunk):
    """(tile, batch, head) of block `pid`, for x (B, H, S, D) with that many tiles: `chunk` heads run together, tile by
    tile, so that what they read stays in the L2.
    """
    heads = x.shape[1]
    group, local = pid // (chunk * tiles), pid % (chunk * tiles)
    width = min(chunk, heads * x.shape[0] - group * chunk)
    head = group * chunk + local % width
    return local // width, head // heads, head % heads


def tiles_of_keys(first, s_k, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT):
    """(begin, full, full_end, end) for BLOCK_M queries at positions from `first` on: they see key tiles [begin, end),
    and every key of [full, full_end).
    """
    begin, full, full_end, end = 0, 0, s_k // BLOCK_N, ct.cdiv(s_k, BLOCK_N)
    if LEFT:
        begin = min(max(0, first - left) // BLOCK_N, end)
        full = ct.cdiv(max(0, first + BLOCK_M - 1 - left), BLOCK_N)
    if RIGHT:
        end = min(end, ct.cdiv(max(0, first + BLOCK_M + right), BLOCK_N))
        full_end = min(full_end, max(0, first + right + 1) // BLOCK_N)
    full = min(full, end)
    return begin, full, max(full, full_end), end


def tiles_of_queries(first, s_q, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT):
    """(begin, full, full_end, end) for BLOCK_N keys, the first one `first` positions after query 0: query tiles
    [begin, end) see them, and every query of [full, full_end) sees all of them.
    """
    tiles = ct.cdiv(s_q, BLOCK_M)
    begin, full, full_end, end = 0, 0, tiles, tiles
    if RIGHT:
        begin = min(max(0, first - right) // BLOCK_M, tiles)
        full = ct.cdiv(max(0, first + BLOCK_N - 1 - right), BLOCK_M)
    if LEFT:
        end = min(tiles, ct.cdiv(max(0, first + BLOCK_N + left), BLOCK_M))
        full_end = max(0, first + left + 1) // BLOCK_M
    full = min(full, end)
    return begin, full, min(max(full, full_end), end), end


def load_rows(x, b, h, tile, ROWS, COLUMNS):
    """Load a tile (ROWS, COLUMNS) of one head of x (B, H, S, columns), 0 beyond the edges."""
    index, shape = (b, h, tile, 0), (1, 1, ROWS, COLUMNS)
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO).reshape((ROWS, COLUMNS))


def load_row_stats(x, b, h, tile, ROWS):
    """Load a tile (ROWS,) of one head of x (B, H, S), 0 beyond the edge."""
    return ct.load(x, (b, h, tile), (1, 1, ROWS), padding_mode=ct.PaddingMode.ZERO).reshape((ROWS,))


def masked(x, other, positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED):
    """x, and `other` where the key is masked."""
    if LEFT:
        x = ct.where(keys >= positions - left, x, other)
    if RIGHT:
        x = ct.where(keys <= positions + right, x, other)
    if RAGGED:
        x = ct.where(keys < s_k, x, other)
    return x
