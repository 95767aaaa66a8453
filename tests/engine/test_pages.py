"""Pages: held, shared, idle, evicted; never leaked, lost or given to two.

A model of dicts beside the pool says what each page holds; hypothesis walks both.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tilewright.engine.pages import PagePool
from tilewright.errors import InputError

TOKENS = st.lists(st.integers(0, 1), max_size=14)  # few tokens: prefixes meet


class Pool(RuleBasedStateMachine):
    """Sequences come, publish what they have written, and go."""

    @initialize(pages=st.integers(1, 9), page_size=st.integers(1, 3))
    def make(self, pages, page_size):
        self.pool = PagePool(pages, page_size)
        self.content = {}  # by page: the prefix that it ends
        self.sequences = []  # [tokens, pages, adapter]

    @rule(tokens=TOKENS, adapter=st.integers(0, 1))
    def begin(self, tokens, adapter):
        size = self.pool.page_size
        pages = self.pool.take_prefix(tokens, adapter)
        for n, page in enumerate(pages, 1):
            assert self.content[page] == (adapter, tokens[: n * size]), "a hit holds exactly this prefix"
        more = self.pool.allocate(-(-len(tokens) // size) - len(pages))
        if more is None:
            self.pool.release(pages)
            return
        for n, page in enumerate(more, len(pages) + 1):
            self.content[page] = adapter, tokens[: n * size]  # written by this sequence alone
        self.sequences.append((tokens, pages + more, adapter))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data):
        tokens, pages, adapter = data.draw(st.sampled_from(self.sequences))
        self.pool.publish(tokens[: data.draw(st.integers(0, len(tokens)))], pages, adapter)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        _, pages, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(pages)

    @invariant()
    def every_page_is_in_one_state(self):
        if not hasattr(self, "pool"):
            return
        held = {page for _, pages, _ in self.sequences for page in pages}
        assert self.pool.held == len(held)
        assert len(self.pool._free) + self.pool.idle + len(held) == self.pool.pages
        assert not held & set(self.pool._free) and not held & set(self.pool._idle)
        assert len(set(self.pool._free)) == len(self.pool._free)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _, pages, _ in self.sequences:
            self.pool.release(pages)
        assert self.pool.allocate(self.pool.pages) is not None, "with nothing held, every page can be had"


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_longest_prefix_is_found_and_pages_of_others_are_not():
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    pool.publish([1, 2, 3, 4, 5], pages)
    assert pool.take_prefix([1, 2, 3, 4, 9, 9]) == pages[:2]
    assert pool.take_prefix([1, 2, 9, 9]) == pages[:1]
    assert pool.take_prefix([2, 1]) == []
    assert pool.take_prefix([1]) == []


def test_the_end_of_the_oldest_prefix_is_evicted_first():
    pool = PagePool(4, 1)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.publish([1, 2], old)
    pool.publish([3, 4], new)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.take_prefix([1, 2]) == [old[0]]


def test_a_page_that_is_not_held_cannot_be_released():
    pool = PagePool(2, 1)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(InputError, match="no sequence holds it"):
        pool.release(pages)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_are_checked(sizes):
    with pytest.raises(InputError, match="at least 1"):
        PagePool(*sizes)
