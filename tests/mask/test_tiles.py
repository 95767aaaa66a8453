"""Tile states from closed forms against the dense mask: exact for leaves, for bands and for documents with a band that
holds the diagonal; sound for every combination.  Tables list exactly those tiles.
"""

import torch
from hypothesis import given, settings
from tests.mask.formulas import bands, combinations, documents, leaves, problems, states

from tilewright import mask as masks
from tilewright.mask.classify import Sizes, classify

EXAMPLES = settings(deadline=None, max_examples=150)


def classified(problem):
    """(some, every) expanded as the dense ones."""
    mask, batch, heads, *sizes = problem
    found = classify(*mask.program("cpu"), Sizes(batch, heads, *sizes))
    return [x.expand(batch, heads, *x.shape[2:]) for x in found]


def assert_exact(problem):
    for found, expected in zip(classified(problem), states(*problem), strict=True):
        assert torch.equal(found, expected)


@EXAMPLES
@given(problem=problems(leaves))
def test_leaves_are_exact(problem):
    assert_exact(problem)


@EXAMPLES
@given(problem=problems(lambda b, h, s: bands().flatmap(lambda x: documents(b, s).map(lambda y: x & y))))
def test_documents_with_a_band_are_exact(problem):
    assert_exact(problem)


@EXAMPLES
@given(problem=problems(lambda b, h, s: leaves(b, h, s).map(lambda x: ~x)))
def test_the_complement_of_a_leaf_is_exact(problem):
    assert_exact(problem)


@EXAMPLES
@given(problem=problems(lambda b, h, s: leaves(b, h, s).map(lambda x: masks.causal() | x)))
def test_some_of_a_union_is_exact(problem):
    assert torch.equal(classified(problem)[0], states(*problem)[0])


@EXAMPLES
@given(problem=problems(lambda b, h, s: leaves(b, h, s).map(lambda x: masks.causal() & x)))
def test_every_of_an_intersection_is_exact(problem):
    assert torch.equal(classified(problem)[1], states(*problem)[1])


@EXAMPLES
@given(problem=problems(combinations))
def test_combinations_are_sound(problem):
    (some, every), (dense_some, dense_every) = classified(problem), states(*problem)
    assert (some | ~dense_some).all()
    assert (~every | dense_every).all()


@settings(deadline=None, max_examples=40)
@given(problem=problems(combinations))
def test_tables_list_the_tiles(problem):
    mask, batch, heads, *sizes = problem
    some, every = classified(problem)
    for by in ("query", "key"):
        counts, indices = masks.tile_table(mask, batch, heads, *sizes, by=by)
        assert counts.dtype == torch.int32
        assert indices.dtype == torch.int16
        counts, indices = (x.expand(batch, heads, *x.shape[2:]) for x in (counts, indices))
        turned = [x.mT if by == "key" else x for x in (some & ~every, every)]
        for b, h, row in torch.cartesian_prod(*map(torch.arange, counts.shape[:3])).view(-1, 3).tolist():
            partial, full = (x[b, h, row].nonzero().flatten().tolist() for x in turned)
            assert counts[b, h, row].tolist() == [len(partial), len(full)]
            assert indices[b, h, row, : len(partial) + len(full)].tolist() == partial + full


def test_tables_are_as_small_as_the_mask_allows():
    ids = torch.arange(64).repeat(3, 1) // 16
    for mask, shape in (
        (masks.causal(), (1, 1)),
        (masks.document(ids), (3, 1)),
        (masks.prefix(torch.tensor([9])), (1, 1)),
        (masks.prefix(torch.tensor([9, 8, 7])) & masks.causal(), (3, 1)),
        (masks.block(torch.ones(1, 4, 4, 4, dtype=torch.bool), 16) | masks.causal(), (1, 4)),
        (masks.block(torch.ones(3, 4, 4, 4, dtype=torch.bool), 16), (3, 4)),
    ):
        assert masks.tile_table(mask, 3, 4, 64, 64, 16, 16).counts.shape[:2] == shape


def test_more_tiles_than_int16_can_number():
    table = masks.tile_table(masks.window(0), 1, 1, 1, 2**15 + 1, 1, 1)
    assert table.indices.dtype == torch.int32
    assert table.counts.tolist() == [[[[0, 1]]]]
    assert table.indices[0, 0, 0, 0] == 2**15
