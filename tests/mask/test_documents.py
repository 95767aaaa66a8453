"""Documents by the id of every key: runs of ids become intervals, ids that come again stay a program, and no trace
and no GPU is asked for a number.
"""

import copy
import pickle
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.searches import searched
from tests.mask.formulas import bands, states
from tests.mask.formulas import intervals as any_band
from tests.mask.test_sequences import DEVICES, SEARCH, Calls, assert_same_tables
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright import mask as masks
from tilewright.mask.algebra import Band
from tilewright.mask.classify import Sizes, classify
from tilewright.mask.packed import PACKED_PROGRAMS

CPU = torch.device("cpu")
EXAMPLES = settings(deadline=None, max_examples=200)
IN_ORDER, AGAIN = [3, 3, 4, 7, 7, 7, 9], [3, 3, 4, 3, 7, 7, 9]


@st.composite
def rows_of_ids(draw, rows, length):
    """Ids that never decrease, that are runs in any order, or any; of extreme values too."""
    ids = []
    for _ in range(rows):
        row = draw(st.lists(st.sampled_from([-(2**31), -1, 0, 1, 2, 5, 2**31 - 1]), min_size=length, max_size=length))
        kind = draw(st.sampled_from(["in order", "runs", "any"]))
        if kind != "any":
            order = draw(st.permutations(sorted(set(row)))) if kind == "runs" else sorted(set(row))
            row = sorted(row, key=order.index)
        ids.append(row)
    return ids


@st.composite
def problems(draw):
    """(ids, contiguous, band or None, s_q, s_k, block_m, block_n)."""
    s_k, rows = draw(st.integers(1, 50)), draw(st.integers(1, 3))
    s_q = draw(st.just(s_k) | st.integers(1, 60))
    blocks = draw(st.sampled_from([1, 5, 16])), draw(st.sampled_from([1, 8]))
    band = draw(st.none() | bands() | any_band())
    return draw(rows_of_ids(rows, s_k)), draw(st.booleans()), band, s_q, s_k, *blocks


def runs(ids):
    """The number of each key's run."""
    return [number for number, (_, keys) in enumerate(groupby(ids)) for _ in keys]


def comes_again(ids):
    return len(list(groupby(ids))) > len(set(ids))


def by_loop(ids, contiguous, band, s_q, s_k):
    """bool (rows, S_q, S_k), key by key."""
    low, high = (-(2**31), 2**31) if band is None else (band.low, band.high)
    cells = torch.zeros(len(ids), s_q, s_k, dtype=torch.bool)
    for b, row in enumerate(ids):
        documents = runs(row) if contiguous else row
        for i in range(max(s_q - s_k, 0), s_q):
            p = i + s_k - s_q
            for j in range(s_k):
                cells[b, i, j] = documents[p] == documents[j] and low <= p - j <= high
    return cells


@EXAMPLES
@given(problem=problems())
def test_it_is_the_loop_over_keys_however_it_reaches_kernels(problem):
    ids, contiguous, band, s_q, s_k, *blocks = problem
    batch, sizes = len(ids), (s_q, s_k)
    mask = masks.document(torch.tensor(ids), contiguous=contiguous)
    mask = mask if band is None else mask & band
    expected = by_loop(ids, contiguous, band, s_q, s_k)
    assert torch.equal(mask.dense(batch, 1, s_q, s_k)[:, 0], expected)
    if isinstance(mask, Band):
        return  # a band of nothing leaves nothing
    fitted = mask.fitted(*sizes)
    assert torch.equal(fitted.dense(batch, 1, s_q, s_k)[:, 0], expected)
    places = torch.arange(-3, s_q + 3) + s_k - s_q, torch.arange(s_k)  # places outside are safe, and see nothing
    text, data = mask.fitted_program(*sizes, CPU)
    found = masks.evaluate(text, data, *places, batch, 1)[:, 0].expand(batch, -1, -1)
    assert torch.equal(found[:, 3:-3], expected)
    interval = contiguous or not any(map(comes_again, ids))
    assert (text in PACKED_PROGRAMS) == interval
    if interval:
        assert not found[:, :3].any()
        assert not found[:, -3:].any()
        table = data[3:].view(-1, 3, s_q)
        assert (table[:, :2].diff(dim=-1) >= 0).all()
        tiles = Sizes(batch, 1, s_q, s_k, *blocks)
        for state, wanted in zip(classify(text, data, tiles), states(fitted, batch, 1, *tiles[2:]), strict=True):
            assert torch.equal(state.expand(wanted.shape), wanted)


@pytest.mark.parametrize("ids", [[[]], [[4]], [[4, 4, 4]], [[-1], [2]], [[5, 4, 4], [1, 1, 1]]], ids=str)
def test_the_smallest_are_intervals(ids):
    given = torch.tensor(ids, dtype=torch.int32)
    mask, (batch, length) = masks.document(given) & masks.causal(), given.shape
    assert mask.fitted_program(length, length, CPU)[0] == PACKED_PROGRAMS[batch > 1]
    expected = (given[:, :, None] == given[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    assert torch.equal(mask.dense(batch, 1, length, length)[:, 0], expected)
    assert mask.fitted_program(0, length, CPU)[0] in PACKED_PROGRAMS


def test_one_row_whose_ids_come_again_makes_a_program_of_all():
    assert masks.document(torch.tensor([IN_ORDER, AGAIN])).fitted_program(7, 7, CPU)[0] == "doc.b:0"
    both = masks.document(torch.tensor([IN_ORDER, AGAIN]), contiguous=True)
    assert both.fitted_program(7, 7, CPU)[0] == "seq.b:0"


def test_with_more_than_a_band_it_stays_a_program():
    mask = masks.document(torch.tensor(IN_ORDER)) & masks.causal() & masks.dilated(2)
    assert mask.fitted_program(7, 7, CPU)[0] == "band:0 doc:2 & dilated:4 &"
    again = masks.document(torch.tensor(AGAIN), contiguous=True) | masks.prefix(1)
    allowed = again.dense(1, 1, 7, 7)[0, 0]
    assert torch.equal(allowed, masks.evaluate(*again.program("cpu"), torch.arange(7), torch.arange(7), 1, 1)[0, 0])
    assert not allowed[3, 1], "the fourth key begins another document"


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_mask_keeps_its_ids_and_what_was_found_in_them(contiguous):
    ids = torch.tensor(IN_ORDER, dtype=torch.int32)
    mask = masks.document(ids, contiguous=contiguous)
    expected = mask.dense(1, 1, 7, 7)
    ids.copy_(torch.tensor(AGAIN))
    copies = [
        mask,
        mask.to("cpu"),
        copy.deepcopy(mask),
        pickle.loads(pickle.dumps(mask)),
        (mask & masks.causal()).to(CPU),
    ]
    for made in copies:
        assert made.fitted_program(7, 7, CPU)[0] == "seq:0"
    assert all(torch.equal(made.dense(1, 1, 7, 7), expected) for made in copies[:4])
    assert mask.fitted_program(7, 7, CPU) is mask.fitted_program(7, 7, CPU)
    causal = [(mask & masks.causal()).fitted_program(7, 7, CPU) for _ in range(2)]
    assert causal[0] is causal[1]


# Ids that may not be looked at.


def text_of(ids, **options):
    return masks.document(ids, **options).fitted(7, 7)._words().__next__().word


def test_ids_that_have_no_numbers_here_are_not_asked_for():
    for place in ("meta", "fake"):
        with FakeTensorMode(allow_non_fake_inputs=True) if place == "fake" else torch.device("meta"):
            ids = torch.zeros(2, 7, dtype=torch.int32)
            assert text_of(ids) == "doc.b"
            assert text_of(ids, contiguous=True) == "seq.b"


def test_contiguous_ids_take_as_many_steps_whatever_they_are_and_ask_for_no_number():
    found = []
    for width in (1, 300):
        ids = torch.arange(700) // width
        with Calls() as calls:
            (masks.document(ids, contiguous=True) & masks.causal()).fitted_program(700, 700, CPU)
        found.append(calls.names)
    assert found[0] == found[1]
    assert "aten::_local_scalar_dense" not in found[0]
    assert len(found[0]) <= 16


def visible(ids):
    data = masks.document(ids).program("cpu")[1]
    return data[2:, None] == data[None, 2:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["make_fx", "jit.trace", "compile"])
def test_a_trace_of_ids_in_order_is_right_for_others(how):
    """What a trace decided would serve ids that it has not seen."""
    in_order, again = torch.tensor(IN_ORDER), torch.tensor(AGAIN)
    trace = {
        "make_fx": lambda: make_fx(visible)(in_order),
        "jit.trace": lambda: torch.jit.trace(visible, (in_order,), check_trace=False),
        "compile": lambda: torch.compile(visible, backend="eager", fullgraph=True),
    }[how]()
    assert torch.equal(trace(in_order), visible(in_order))
    assert torch.equal(trace(again), again[:, None] == again)


def test_the_ids_of_cu_seqlens_are_found_in_no_slice():
    with searched() as boundaries:
        made = masks.document(cu_seqlens=torch.tensor([0, 2, 2, 5]), length=7).by_id()
    assert made.ids.tolist() == [[0, 0, 2, 2, 2, 3, 3]]
    assert boundaries
    assert not any(b.storage_offset() for b in boundaries)


def test_contiguous_ids_of_a_compiled_graph_are_those_of_eager():
    def numbers(ids):
        mask = masks.document(ids, contiguous=True) & masks.causal()
        return mask.fitted_program(7, 7, CPU)[1], mask.fitted_program(3, 7, CPU)[1]

    compiled = torch.compile(numbers, fullgraph=True, backend="eager")
    for ids in (IN_ORDER, AGAIN):
        for made, expected in zip(compiled(torch.tensor(ids)), numbers(torch.tensor(ids)), strict=True):
            assert torch.equal(made, expected)


# In kernels.


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_of_a_kernel_is_the_dense_mask(device, transposed):
    from tests.mask.kernels import dense

    mask = masks.document(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 2, 9, 9]])) & masks.window(2, 1)
    for s_q in (11, 8, 3):
        fitted = mask.fitted(s_q, 8)
        made = dense(fitted.to(device), 2, 2, s_q, 8, device, transposed)
        assert torch.equal(made.cpu(), mask.dense(2, 2, s_q, 8))


@pytest.mark.parametrize("device", DEVICES)
@SEARCH
@given(problem=problems(), join=st.sampled_from(["", "&", "|"]))
def test_tables_are_those_of_torch(device, problem, join):
    ids, _, band, s_q, s_k, *blocks = problem
    documents = masks.document(torch.tensor(ids), contiguous=True)
    mask = (documents if band is None else documents & band).fitted(s_q, s_k)
    if join:
        other = masks.document(torch.arange(s_k) // 7)
        mask = mask & other & ~mask if join == "&" else other | mask
    assert_same_tables(mask, device, len(ids), 2, s_q, s_k, *blocks)
