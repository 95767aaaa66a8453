"""The algebra: each leaf is its formula, in FlexAttention's form and as a program; bands fold; wrong input is told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mask.formulas import FORMULAS, by_formula, combinations, intervals, problems

import tilewright
from tilewright import mask as masks
from tilewright.errors import InputError

S_K, B, H = 11, 2, 2


@pytest.mark.parametrize("s_q", [11, 4, 1, 13])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_mask_is_its_formula(name, s_q):
    mask, rule = FORMULAS[name]
    expected = by_formula(rule, B, H, s_q, S_K)
    assert torch.equal(mask.dense(B, H, s_q, S_K), expected)
    places = torch.arange(s_q) + S_K - s_q, torch.arange(S_K)
    assert torch.equal(masks.evaluate(*mask.program("cpu"), *places, B, H).expand_as(expected), expected)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (1, 1), (0, 2), (1, 0)])
@pytest.mark.parametrize("name", FORMULAS)
def test_part_of_the_batch_has_its_own_part_of_the_mask(name, start, length):
    mask, rule = FORMULAS[name]
    expected = by_formula(rule, B, H, 4, S_K)[start : start + length]
    part = mask.narrow(start, length)
    assert torch.equal(part.dense(length, H, 4, S_K), expected)
    places = torch.arange(4) + S_K - 4, torch.arange(S_K)
    for program in (part.program("cpu"), part.fitted_program(4, S_K, torch.device("cpu"))):
        assert torch.equal(masks.evaluate(*program, *places, length, H).expand_as(expected), expected)


@settings(deadline=None, max_examples=60)
@given(problem=problems(combinations))
def test_the_program_says_what_the_mask_says(problem):
    mask, batch, heads, s_q, s_k, *_ = problem
    found = masks.evaluate(*mask.program("cpu"), torch.arange(s_q) + s_k - s_q, torch.arange(s_k), batch, heads)
    assert found.shape[2:] == (s_q, s_k)
    assert torch.equal(found.expand(batch, heads, s_q, s_k), mask.dense(batch, heads, s_q, s_k))


@settings(deadline=None, max_examples=300)
@given(band=intervals(), other=intervals(), join=st.sampled_from("&|~"))
def test_folding_bands_changes_nothing(band, other, join):
    made = {"&": lambda: band & other, "|": lambda: band | other, "~": lambda: ~band}[join]()
    d = torch.arange(-99, 100)
    allowed = [(d >= m.low) & (d <= m.high) for m in (band, other)]
    expected = {"&": allowed[0] & allowed[1], "|": allowed[0] | allowed[1], "~": ~allowed[0]}[join]
    assert torch.equal(made.mask_mod(None, None, d, torch.zeros_like(d)).expand(len(d)), expected)


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (masks.causal(), (-1, 0)),
        (masks.window(7), (7, 0)),
        (masks.causal() & masks.window(7, None), (7, 0)),
        (masks.causal() & masks.window(9, 9) & masks.window(4, None), (4, 0)),
        (masks.window(None, None), (-1, -1)),
        (masks.window(3, 3) | masks.causal(), (-1, 3)),
        (~~masks.window(3, 3), (3, 3)),
        (masks.window(None, None) & masks.causal(), (-1, 0)),
        (~masks.causal(), None),  # the diagonal is outside
        (masks.causal() & ~masks.causal(), None),  # nothing
        (masks.causal() & masks.prefix(2), None),
        (~masks.window(3, 3), None),
    ],
)
def test_a_band_is_what_kernels_take_as_two_numbers(mask, band):
    assert mask.band() == band


def test_a_leaf_that_changes_nothing_disappears():
    everything, nothing = masks.window(None, None), masks.causal() & ~masks.causal()
    leaf = masks.prefix(3)
    assert (everything & leaf) is leaf
    assert (nothing | leaf) is leaf
    assert (everything | leaf).band() == (-1, -1)
    assert not (nothing & leaf).dense(1, 1, 5, 5).any()


def test_the_text_depends_on_the_structure_alone():
    for left, length in ((3, 100), (4095, 7)):
        documents = masks.document(torch.zeros(length, dtype=torch.int32))
        mask = masks.window(left) & documents | masks.prefix(torch.tensor([left, length]))
        assert mask.program("cpu")[0] == "band:0 doc:2 & prefix.b:4 |"


def test_a_program_is_made_once_and_a_mask_keeps_its_own_copy():
    ids = torch.tensor([0, 0, 1, 1])
    mask = masks.document(ids)
    ids.fill_(5)
    assert mask.program("cpu")[1] is mask.program(torch.device("cpu"))[1]
    assert mask.program("cpu")[1].tolist() == [4, 2, 0, 0, 1, 1]
    assert not mask.dense(1, 1, 4, 4)[0, 0, 0, 3]


def test_a_program_made_without_gradients_serves_a_backward():
    with torch.inference_mode():
        mask = masks.causal() & masks.document(torch.tensor([0, 0, 1, 1]))
        assert not mask.program("cpu")[1].is_inference()


def test_the_program_of_a_mask_that_an_op_makes_causal_is_kept():
    """A call that is captured into a CUDA graph may copy nothing: the one before has."""
    mask = masks.document(torch.tensor([0, 0, 1, 1]))
    text, data = (mask & masks.causal()).program("cpu")
    assert (mask & masks.causal()).program("cpu")[1] is data
    assert (text, data.tolist()) == ("band:0 doc:2 &", [0, 2**31 - 1, 4, 4, 0, 0, 1, 1])
    assert (mask & masks.window(3)).program("cpu")[1].tolist()[:2] == [0, 3]
    assert mask.program("cpu")[1].tolist() == [4, 2, 0, 0, 1, 1]


def test_a_program_made_in_a_compiled_graph_is_that_of_eager():
    outer = masks.causal() & masks.document(torch.tensor([0, 0, 1, 1]))

    @torch.compile(fullgraph=True, backend="eager")
    def numbers(ids):
        inner = masks.causal() & masks.document(ids)
        return inner.program("cpu")[1], outer.program("cpu")[1]

    made = numbers(torch.tensor([3, 3, 4, 4]))
    assert made[0].tolist() == [0, 2**31 - 1, 4, 4, 3, 3, 4, 4]
    assert torch.equal(made[1], outer.program("cpu")[1])
    assert made[1] is not outer.program("cpu")[1], "kept, and its memory may be a graph's"


def test_cu_seqlens_may_hold_empty_documents_and_end_early():
    mask = masks.document(cu_seqlens=torch.tensor([0, 0, 2, 2, 3]), length=6)
    assert mask.program("cpu")[1].tolist()[2:] == [1, 1, 3, 4, 4, 4]
    assert masks.document(cu_seqlens=torch.tensor([0]), length=2).dense(1, 1, 2, 2).all()


def test_no_key_and_no_query():
    mask = masks.document(torch.zeros(0, dtype=torch.int32)) & masks.causal()
    assert mask.dense(1, 2, 3, 0).shape == (1, 2, 3, 0)
    assert masks.tile_table(mask, 1, 2, 3, 0, 16, 16).counts.tolist() == [[[[0, 0]]]]
    assert masks.tile_table(masks.causal(), 1, 2, 0, 5, 16, 16).counts.shape == (1, 1, 0, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.window(-1), "left = -1"),
        (lambda: masks.window(3, -2), "right = -2"),
        (lambda: masks.document(), "either ids or cu_seqlens"),
        (lambda: masks.document(torch.zeros(3)), "ids"),
        (lambda: masks.document(torch.zeros(3, dtype=torch.int32), length=4), "length = 4"),
        (lambda: masks.document(cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)), "cu_seqlens"),
        (lambda: masks.prefix(-1), "n = -1"),
        (lambda: masks.prefix(torch.ones(2)), "n = "),
        (lambda: masks.global_tokens(1.5), "g = 1.5"),
        (lambda: masks.dilated(0), "step = 0"),
        (lambda: masks.strided(0), "step = 0"),
        (lambda: masks.block(torch.ones(2, 2), 4), "table"),
        (lambda: masks.block(torch.ones(2, 2, 2, dtype=torch.bool), 4), "table"),
        (lambda: masks.block(torch.ones(2, 2, dtype=torch.bool), (4, 0)), "size = 0"),
        (lambda: masks.block(torch.ones(2, 2, dtype=torch.bool), (4, 4, 4)), "size"),
        (lambda: masks.tile_table(masks.causal(), 1, 1, 8, 8, 4, 4, by="row"), "by='row'"),
    ],
)
def test_wrong_parameters_are_told(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.document(torch.zeros(9, dtype=torch.int32)), "9 keys for S_k = 8"),
        (masks.document(torch.zeros(3, 8, dtype=torch.int32)), "B = 3"),
        (masks.prefix(torch.tensor([1, 2, 3])), "B = 3"),
        (masks.block(torch.ones(2, 3, dtype=torch.bool), 4), r"needs \(2, 2\)"),
        (masks.block(torch.ones(3, 1, 2, 2, dtype=torch.bool), 4), "B = 3"),
        (masks.block(torch.ones(1, 3, 2, 2, dtype=torch.bool), 4), "H = 3"),
    ],
)
def test_a_mask_of_another_size_is_told(mask, words):
    for combined in (mask, masks.causal() & ~mask):
        with pytest.raises(InputError, match=words):
            combined.check(2, 2, 8, 8)


def test_python_words_instead_of_operators_are_an_error():
    with pytest.raises(TypeError, match="& | ~"):
        bool(masks.causal())
    with pytest.raises(TypeError):
        masks.causal() & 3


def test_it_is_reached_from_the_package():
    assert tilewright.mask.causal is masks.causal
    assert callable(masks.from_block_mask)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = masks.nonsense
