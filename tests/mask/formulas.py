"""Masks beside their formulas, written once more in plain Python; and random ones for properties."""

import torch
from hypothesis import strategies as st

from tilewright import mask as masks
from tilewright.mask.algebra import HIGHEST, LOWEST, Band


def by_formula(rule, batch, heads, s_q, s_k):
    """bool (batch, heads, s_q, s_k) of `rule(b, h, position, key)`."""
    cells = [
        rule(b, h, i + s_k - s_q, j) for b in range(batch) for h in range(heads) for i in range(s_q) for j in range(s_k)
    ]
    return torch.tensor(cells, dtype=torch.bool).view(batch, heads, s_q, s_k)


IDS = [[0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4], [7, 7, 7, 7, 7, 7, 8, 9, 9, 9, 9]]
TABLE = [[[[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], [[0, 0, 1], [1, 1, 1], [0, 1, 0], [0, 0, 1]]]]


def packed(i, j, cu_q, cu_k, left=None, right=None):
    """May query i of packed sequences see key j?  Document by document."""
    for d in range(len(cu_q) - 1):
        if cu_q[d] <= i < cu_q[d + 1] and cu_k[d] <= j < cu_k[d + 1]:
            distance = (i - cu_q[d + 1]) - (j - cu_k[d + 1])
            return (left is None or distance <= left) and (right is None or distance >= -right)
    return False


# name: mask for S_k = 11, B = 2, H = 2; may the query at p of batch b and head h see key j?
FORMULAS = {
    "causal": (masks.causal(), lambda b, h, p, j: p >= j),
    "window": (masks.window(3, 1), lambda b, h, p, j: -1 <= p - j <= 3),
    "window_left": (masks.window(2, None), lambda b, h, p, j: p - j <= 2),
    "document": (masks.document(torch.tensor(IDS[0])), lambda b, h, p, j: p >= 0 and IDS[0][p] == IDS[0][j]),
    "document_batched": (masks.document(torch.tensor(IDS)), lambda b, h, p, j: p >= 0 and IDS[b][p] == IDS[b][j]),
    "document_cu_seqlens": (
        masks.document(cu_seqlens=torch.tensor([0, 3, 3, 5, 9, 11])),
        lambda b, h, p, j: p >= 0 and IDS[0][p] == IDS[0][j],
    ),
    "prefix": (masks.prefix(4), lambda b, h, p, j: j < 4),
    "prefix_batched": (masks.prefix(torch.tensor([4, 7])), lambda b, h, p, j: j < (4, 7)[b]),
    "prefix_tensor": (masks.prefix(torch.tensor([5])), lambda b, h, p, j: j < 5),
    "global_tokens": (masks.global_tokens(2), lambda b, h, p, j: p < 2 or j < 2),
    "dilated": (masks.dilated(3), lambda b, h, p, j: (p - j) % 3 == 0),
    "strided": (masks.strided(4), lambda b, h, p, j: j % 4 == 3),
    "block": (
        masks.block(torch.tensor(TABLE[0][0]).bool(), (3, 4)),
        lambda b, h, p, j: p >= 0 and TABLE[0][0][p // 3][j // 4],
    ),
    "block_heads": (
        masks.block(torch.tensor(TABLE).bool(), (3, 4)),
        lambda b, h, p, j: p >= 0 and TABLE[0][h][p // 3][j // 4],
    ),
    "not": (~masks.strided(4), lambda b, h, p, j: j % 4 != 3),
    "prefix_lm": (masks.causal() | masks.prefix(4), lambda b, h, p, j: p >= j or j < 4),
    "three": (
        masks.causal() & masks.window(5) & ~masks.dilated(2) | masks.global_tokens(1),
        lambda b, h, p, j: (0 <= p - j <= 5 and (p - j) % 2 == 1) or p < 1 or j < 1,
    ),
}


def intervals():
    """Of any place and size, empty ones too."""
    side = st.integers(-9, 9)
    return st.builds(Band, st.just(LOWEST) | side, st.just(HIGHEST) | side)


def bands():
    """Those that hold the diagonal."""
    side = st.none() | st.integers(0, 40)
    return st.builds(masks.window, side, side)


def ids(shape, sorted_ids=True):
    def made(seed):
        found = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed))
        return masks.document(found.sort(-1)[0] if sorted_ids else found)

    return st.builds(made, st.integers(0, 2**31))


@st.composite
def boundaries(draw, documents, length):
    """cu_seqlens of so many documents, empty ones too, that may end before `length`."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), min_size=documents, max_size=documents)))]


@st.composite
def packings(draw, s_q, s_k):
    """(mask, cu_q, cu_k, left, right) of packed sequences."""
    count = draw(st.integers(0, 6))
    cu_q, cu_k = draw(boundaries(count, s_q)), draw(boundaries(count, s_k))
    side = st.none() | st.integers(0, 40)
    left, right = draw(side), draw(side)
    mask = masks.sequences(torch.tensor(cu_q), torch.tensor(cu_k), length_q=s_q, length_k=s_k, window=(left, right))
    return mask, cu_q, cu_k, left, right


def documents(batch, s_k, sorted_ids=True):
    return st.sampled_from([(s_k,), (1, s_k), (batch, s_k)]).flatmap(lambda shape: ids(shape, sorted_ids))


@st.composite
def blocks(draw, batch, heads, s_k):
    size_q, size_k = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), -(-s_k // size_q), -(-s_k // size_k))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return masks.block(torch.rand(shape, generator=random) < draw(st.sampled_from([0.1, 0.5, 0.95])), (size_q, size_k))


def leaves(batch, heads, s_k):
    """Any leaf that fits; its tile states are exact."""
    count = st.integers(0, 50)
    return st.one_of(
        bands(),
        intervals(),
        documents(batch, s_k),
        st.builds(masks.prefix, count),
        st.lists(count, min_size=batch, max_size=batch).map(lambda n: masks.prefix(torch.tensor(n))),
        st.builds(masks.global_tokens, count),
        st.builds(masks.dilated, st.integers(1, 40)),
        st.builds(masks.strided, st.integers(1, 40)),
        blocks(batch, heads, s_k),
    )


def combinations(batch, heads, s_k):
    """Any mask that fits, of up to four leaves, documents in any order too."""
    leaf = leaves(batch, heads, s_k) | documents(batch, s_k, sorted_ids=False)
    return st.recursive(
        leaf,
        lambda m: (
            st.builds(lambda a, b: a & b, m, m) | st.builds(lambda a, b: a | b, m, m) | st.builds(lambda a: ~a, m)
        ),
        max_leaves=4,
    )


@st.composite
def problems(draw, of):
    """(mask, batch, heads, s_q, s_k, block_m, block_n) with a mask of the strategy `of(batch, heads, s_k)`."""
    batch, heads, s_k = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 90))
    s_q = draw(st.sampled_from([s_k, s_k, 1]) | st.integers(1, 100))
    block_m, block_n = draw(st.sampled_from([1, 5, 16, 32, 64])), draw(st.sampled_from([1, 8, 16, 32, 64]))
    return draw(of(batch, heads, s_k)), batch, heads, s_q, s_k, block_m, block_n


def states(mask, batch, heads, s_q, s_k, block_m, block_n):
    """(some, every) (batch, heads, tiles_q, tiles_k) from the dense mask; keys beyond the last are forbidden."""
    dense = mask.dense(batch, heads, s_q, s_k)
    more = (0, -s_k % block_n, 0, -s_q % block_m)
    some = torch.nn.functional.pad(dense, more)
    every = torch.nn.functional.pad(torch.nn.functional.pad(dense, (0, more[1])), (0, 0, 0, more[3]), value=True)
    some, every = (x.unflatten(3, (-1, block_n)).unflatten(2, (-1, block_m)) for x in (some, every))
    return some.any(-1).any(3), every.all(-1).all(3)
