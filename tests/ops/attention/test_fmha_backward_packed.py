"""The order in which blocks of the Hopper backward add to dq under packed sequences, modelled with the
kernel's formulas: every block's turn comes, whatever the numbers; and of sequences no pair is forgotten.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mask.formulas import packings

EXAMPLES = settings(deadline=None, max_examples=200)


def partition_point(count: int, condition: Callable[[int], bool]) -> int:
    """By the same steps as in schedule.cuh, which matter where the condition has no order."""
    low = 0
    while low < count:
        middle = (low + count) // 2
        low, count = (middle + 1, count) if condition(middle) else (low, middle)
    return low


class Problem(NamedTuple):
    """m, n: queries and keys of a tile.  intervals: the queries of each key, which sm90_fmha_intervals finds."""

    s_q: int
    s_k: int
    m: int
    n: int
    allowed: torch.Tensor
    intervals: list[tuple[int, int]]

    @property
    def tiles_q(self) -> int:
        return -(-self.s_q // self.m)

    @property
    def tiles_k(self) -> int:
        return -(-self.s_k // self.n)

    def last_query_end(self, n: int) -> int:
        return self.intervals[min((n + 1) * self.n, self.s_k) - 1][1]

    def key_tiles(self, m: int) -> range:
        """Tiles of keys that add to tile m of queries: `BackwardProblem<true>::key_tiles`."""
        begin, end = m * self.m, min((m + 1) * self.m, self.s_q)
        first = partition_point(self.tiles_k, lambda n: self.last_query_end(n) <= begin)
        return range(first, partition_point(self.tiles_k, lambda n: self.intervals[n * self.n][0] < end))

    def query_tiles(self, n: int) -> range:
        """Tiles of queries that tile n of keys meets: `BackwardProblem<true>::query_tiles`."""
        first = self.intervals[n * self.n][0]
        return range(first // self.m if first < self.s_q else self.tiles_q, -(-self.last_query_end(n) // self.m))


def solved(s_q, s_k, m, n, allowed, first, end):
    """first, end: the keys of each query."""
    ends = (end, first)
    intervals = [tuple(partition_point(s_q, lambda i, of=of, j=j: of[i] <= j) for of in ends) for j in range(s_k)]
    return Problem(s_q, s_k, m, n, allowed, intervals)


@st.composite
def problems(draw, longest=90, tiles=(1, 4, 8)):
    s_q, s_k = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    mask, *_ = draw(packings(s_q, s_k))
    _, data = mask.program("cpu")
    m, n = draw(st.sampled_from(tiles)), draw(st.sampled_from(tiles))
    return solved(s_q, s_k, m, n, mask.dense(1, 1, s_q, s_k)[0, 0], *data[3 : 3 + 2 * s_q].view(2, s_q).tolist())


@st.composite
def disorders(draw):
    """Of boundaries that decrease, or point nowhere."""
    s_q, s_k = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    ends = st.lists(st.integers(-9, 60), min_size=s_q, max_size=s_q)
    m, n = draw(st.sampled_from((1, 4, 8))), draw(st.sampled_from((1, 4, 8)))
    return solved(s_q, s_k, m, n, torch.zeros(s_q, s_k, dtype=torch.bool), draw(ends), draw(ends))


@EXAMPLES
@given(p=problems())
def test_every_key_is_seen_by_an_interval_of_queries(p):
    for key, (first, end) in enumerate(p.intervals):
        assert p.allowed[:, key].nonzero().flatten().tolist() == list(range(first, end))
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(p.intervals))


@EXAMPLES
@given(p=problems() | disorders())
def test_those_that_add_to_a_tile_are_those_that_meet_it(p):
    meets = [p.query_tiles(n) for n in range(p.tiles_k)]
    for m in range(p.tiles_q):
        assert list(p.key_tiles(m)) == [n for n in range(p.tiles_k) if m in meets[n]]
    for query, key in p.allowed.nonzero().tolist():
        assert query // p.m in meets[key // p.n], "a pair that no tile multiplies"


@EXAMPLES
@given(p=problems(tiles=(8, 16)))
def test_a_tile_that_is_not_cut_is_seen_whole(p):
    """`needs_mask`, of half a block's keys."""
    intervals, half = p.intervals, p.n // 2
    for key in range(0, p.s_k, half):
        for row in range(0, p.s_q, p.m):
            last, below = key + half - 1, min(row + p.m, p.s_q)
            cut = last >= p.s_k or intervals[last][0] > row or intervals[key][1] < below
            assert cut == (last >= p.s_k or not p.allowed[row:below, key : last + 1].all())


@EXAMPLES
@given(
    p=problems() | disorders(),
    blocks=st.integers(1, 6),
    heads=st.integers(1, 5),
    section_heads=st.integers(1, 5),
    alternate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_turn_comes(p, blocks, heads, section_heads, alternate, seed):
    """Blocks in any relative speed, each waiting at its first dq until it may leave."""
    section_heads = min(heads, section_heads)
    flags, numbers = {}, iter(range(p.tiles_k * heads))

    def block():
        for number in numbers:
            section = number // (p.tiles_k * section_heads)
            begin = section * section_heads
            width = min(section_heads, heads - begin)
            tile, item = divmod(number - section * p.tiles_k * section_heads, width)
            head = begin + item
            order_a = not alternate or (heads - 1) // section_heads % 2 != section % 2
            n = p.tiles_k - 1 - tile if order_a else tile
            for m in p.query_tiles(n) if order_a else reversed(p.query_tiles(n)):
                key_tiles = p.key_tiles(m)
                rank = key_tiles.stop - 1 - n if order_a else n - key_tiles.start
                while flags.get((head, m), 0) != rank:
                    yield False
                flags[head, m] = rank + 1
                yield True

    order = torch.Generator().manual_seed(seed)
    running = [block() for _ in range(blocks)]
    while running:
        moved = False
        for at in torch.randperm(len(running), generator=order).tolist():
            moved |= next(running[at], True)  # True too of a block that found nothing more to draw
        running = [b for b in running if b.gi_frame is not None]
        assert moved, "all wait"
    assert all(flags.get((head, m), 0) == len(p.key_tiles(m)) for head in range(heads) for m in range(p.tiles_q))
