"""Caches, tables and lengths drawn by Hypothesis, and where tokens lie in them, found one by one in Python."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

GARBAGE = 2147480000


@dataclass
class Paged:
    """page_size None: contiguous.  `new[b]` of the `lengths[b]` tokens of sequence b are new; the last are."""

    page_size: int | None
    capacity: int
    lengths: list[int]
    new: list[int]
    padding: int
    table: list[list[int]]  # without garbage
    pages: int

    @property
    def size(self):
        return self.capacity if self.page_size is None else self.page_size

    def slot(self, b, position):
        if self.page_size is None:
            return b, position
        return self.table[b][position // self.page_size], position % self.page_size

    def tokens(self):
        """(row of the packed tensors, sequence, position) of every new token."""
        row = 0
        for b, (length, n) in enumerate(zip(self.lengths, self.new, strict=True)):
            for i in range(n):
                yield row, b, length - n + i
                row += 1

    @property
    def rows(self):
        return sum(self.new) + self.padding

    def metadata(self):
        """The op's keyword arguments: int32, table tails garbage."""
        bounds = torch.tensor([0, *self.new]).cumsum(0).int()
        options = {"cu_seqlens": bounds}
        if self.page_size is not None:
            width = max([-(-self.capacity // self.page_size), *map(len, self.table), 1])
            rows = [row + [GARBAGE] * (width - len(row)) for row in self.table]
            options["block_table"] = torch.tensor(rows, dtype=torch.int32).view(len(self.lengths), width)
        return torch.tensor(self.lengths, dtype=torch.int32), options

    def cache(self, h, d, dtype=torch.float32, seed=0):
        """Random, and NaN in every slot that no sequence has reached."""
        generator = torch.Generator().manual_seed(seed)
        cache = torch.full((self.pages, self.size, h, d), torch.nan)
        for b, length in enumerate(self.lengths):
            for position in range(length):
                cache[self.slot(b, position)] = torch.randn(h, d, generator=generator)
        return cache.to(dtype)


@st.composite
def paged(draw, *, shared=True):
    """Lengths on both sides of a page's end; pages permuted, some unused, full ones before the new tokens shared."""
    page_size = draw(st.sampled_from([1, 3, 16, 64, None]))
    edge = page_size or 7
    lengths = draw(st.lists(st.sampled_from([0, 1, max(edge - 1, 0), edge, edge + 1, 2 * edge + 1]), max_size=4))
    new = [draw(st.one_of(st.sampled_from([0, min(n, 1), n]), st.integers(0, n))) for n in lengths]
    padding = draw(st.sampled_from([0, 0, 1, 5]))
    capacity = max([1, *lengths]) + draw(st.integers(0, 3))
    if page_size is None:
        return Paged(None, capacity, lengths, new, padding, [], len(lengths))
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + draw(st.integers(1, 3))
    order = draw(st.permutations(range(pages)))
    table, start = [], 0
    for count in counts:
        table.append(list(order[start : start + count]))
        start += count
    if shared:  # every sequence has the first one's full pages that hold no new token of either
        prefix = [(n - k) // page_size for n, k in zip(lengths, new, strict=True)]
        for b in range(1, len(table)):
            common = min(prefix[0], prefix[b])
            table[b][:common] = table[0][:common]
    return Paged(page_size, capacity, lengths, new, padding, table, pages)
