"""What the attention kernels in cuTile share: which tile a block works on, what a band lets it see, and loads."""

from tilewright.jit.cutile_language import ct

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def place(at, tiles, x, together):
    """(tile, batch, head) of block `at`, for x (B, H, S, D) with that many tiles: `together` heads at a time, tile by
    tile, so that what the heads read stays in L2.
    """
    heads = x.shape[1]
    group, rest = at // (together * tiles), at % (together * tiles)
    wide = min(together, heads * x.shape[0] - group * together)
    head = group * together + rest % wide
    return rest // wide, head // heads, head % heads


def tiles_of_keys(first, s_k, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT):
    """(begin, full, full_end, end) for BLOCK_M queries at positions from `first` on: of the tiles [begin, end) they
    see only [full, full_end) whole.
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
    """(begin, full, full_end, end) for BLOCK_N keys, of which query 0 is `first` before the first: of the tiles [begin,
    end) they are seen by, [full, full_end) see all of them.
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


def rows(x, b, h, tile, ROWS, COLUMNS):
    """Tile of a head of x (B, H, S, columns), (ROWS, COLUMNS), 0 beyond the edges."""
    at, shape = (b, h, tile, 0), (1, 1, ROWS, COLUMNS)
    return ct.load(x, at, shape, padding_mode=ct.PaddingMode.ZERO).reshape((ROWS, COLUMNS))


def line(x, b, h, tile, ROWS):
    """Tile of a head of x (B, H, S), (ROWS,), 0 beyond the edge."""
    return ct.load(x, (b, h, tile), (1, 1, ROWS), padding_mode=ct.PaddingMode.ZERO).reshape((ROWS,))


def masked(x, other, positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED):
    """x, and `other` where a key is not to be seen."""
    if LEFT:
        x = ct.where(keys >= positions - left, x, other)
    if RIGHT:
        x = ct.where(keys <= positions + right, x, other)
    if RAGGED:
        x = ct.where(keys < s_k, x, other)
    return x
