"""Packed sequences: every evaluator says what the loop over documents says, tiles are exact, and making it waits for
nothing.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mask.formulas import bands, boundaries, intervals, packed, packings, states
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import mask as masks
from tilewright.errors import InputError
from tilewright.mask.algebra import Band
from tilewright.mask.classify import Sizes, classify
from tilewright.mask.packed import PACKED_PROGRAMS

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
EXAMPLES = settings(deadline=None, max_examples=150)
SEARCH = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
TEXT, IN_A_PROGRAM = "seq:0", "band:0 seq:2 & doc.b:5 | seq.b:7 ~ |"


@st.composite
def problems(draw):
    """(packing, s_q, s_k, block_m, block_n)."""
    s_q, s_k = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    return draw(packings(s_q, s_k)), s_q, s_k, draw(st.sampled_from([1, 5, 16])), draw(st.sampled_from([1, 8, 16]))


def by_loop(packing, s_q, s_k):
    _, *rule = packing
    return torch.tensor([[packed(i, j, *rule) for j in range(s_k)] for i in range(s_q)])


def assert_same_tables(mask, device, *sizes):
    from tilewright.mask import triton_tables

    for by in ("query", "key"):
        expected = masks.tile_table(mask, *sizes, by=by)
        found = triton_tables.build(*mask.to(device).program(device), Sizes(*sizes), by)
        assert torch.equal(found.counts.cpu(), expected.counts)
        used = torch.arange(expected.indices.shape[-1]) < expected.counts.sum(-1, keepdim=True)
        assert torch.equal(found.indices.cpu()[used], expected.indices[used])


@EXAMPLES
@given(problem=problems())
def test_it_is_the_loop_over_documents(problem):
    packing, s_q, s_k, *_ = problem
    mask, expected = packing[0], by_loop(packing, s_q, s_k)
    assert torch.equal(mask.dense(1, 1, s_q, s_k)[0, 0], expected)
    positions = torch.arange(-3, s_q + 3) + s_k - s_q  # places outside are safe, and see nothing
    found = masks.evaluate(*mask.program("cpu"), positions, torch.arange(s_k), 1, 1)[0, 0]
    assert torch.equal(found[3:-3], expected)
    assert not found[:3].any()
    assert not found[-3:].any()


@EXAMPLES
@given(problem=problems())
def test_tiles_are_exact(problem):
    (mask, *_), *sizes = problem
    found = classify(*mask.program("cpu"), Sizes(1, 1, *sizes))
    for state, expected in zip(found, states(mask, 1, 1, *sizes), strict=True):
        assert torch.equal(state, expected)


@EXAMPLES
@given(problem=problems(), band=bands(), join=st.sampled_from("&|"), complement=st.booleans())
def test_combinations_are_sound(problem, band, join, complement):
    (mask, *_), *sizes = problem
    mask = ~mask if complement else mask
    mask = mask & band if join == "&" else mask | band
    some, every = classify(*mask.program("cpu"), Sizes(1, 1, *sizes))
    dense_some, dense_every = states(mask, 1, 1, *sizes)
    assert (some | ~dense_some).all()
    assert (~every | dense_every).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), length=st.integers(1, 60), side=st.none() | st.integers(0, 20), causal=st.booleans())
def test_of_equal_sequences_it_is_documents_and_a_band(data, length, side, causal):
    """Up to the end: behind it, `document` has one more."""
    cu = torch.tensor(data.draw(boundaries(data.draw(st.integers(0, 5)), length)))
    made = masks.sequences(cu, length_q=length, causal=causal, window=(side, None))
    documents = masks.document(cu_seqlens=cu, length=length) & masks.window(side, 0 if causal else None)
    end = int(cu[-1])
    expected = documents.dense(1, 1, length, length)[0, 0]
    expected[end:], expected[:, end:] = False, False
    assert torch.equal(made.dense(1, 1, length, length)[0, 0], expected)


@EXAMPLES
@given(data=st.data(), s_q=st.integers(1, 60), s_k=st.integers(1, 60), band=st.none() | bands() | intervals())
def test_packed_documents_become_sequences_of_an_attention_s_size(data, s_q, s_k, band):
    """Also behind the last boundary, boundaries behind the last key, and bands on one side of the diagonal."""
    cu = torch.tensor(data.draw(boundaries(data.draw(st.integers(0, 5)), s_k + 9)))
    mask = masks.document(cu_seqlens=cu, length=s_k)
    mask = mask if band is None else mask & band
    fitted, blocks = mask.fitted(s_q, s_k), (data.draw(st.sampled_from([1, 5, 16])), data.draw(st.sampled_from([1, 8])))
    assert torch.equal(fitted.dense(1, 1, s_q, s_k), mask.dense(1, 1, s_q, s_k))
    if isinstance(mask, Band):
        return  # a band of nothing leaves nothing
    text, table = fitted.program("cpu")
    assert text == PACKED_PROGRAMS[0]
    first, end = table[3 : 3 + 2 * s_q].view(2, s_q)
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()
    found = classify(text, table, Sizes(1, 1, s_q, s_k, *blocks))
    for state, expected in zip(found, states(mask, 1, 1, s_q, s_k, *blocks), strict=True):
        assert torch.equal(state, expected)


def test_what_is_fitted_is_kept():
    """A call that is captured into a CUDA graph, or makes its mask causal, finds what the one before made."""
    cu = torch.tensor([0, 3, 5])
    mask = masks.document(cu_seqlens=cu, length=7)
    cu.fill_(0)
    causal = [mask & masks.causal() for _ in range(2)]
    assert mask.fitted_program(6, 7, torch.device("cpu")) is mask.fitted_program(6, 7, torch.device("cpu"))
    assert causal[0].fitted_program(6, 7, torch.device("cpu")) is causal[1].fitted_program(6, 7, torch.device("cpu"))
    assert mask.fitted_program(6, 7, torch.device("cpu")) is not mask.fitted_program(5, 7, torch.device("cpu"))
    assert mask.fitted_program(6, 7, torch.device("cpu")) is not causal[0].fitted_program(6, 7, torch.device("cpu"))
    assert mask.dense(1, 1, 7, 7)[0, 0].sum() == 9 + 4 + 4
    with torch.inference_mode():
        assert not mask.fitted_program(4, 7, torch.device("cpu"))[1].is_inference()


def test_what_is_fitted_in_a_compiled_graph_is_that_of_eager():
    outer = masks.document(cu_seqlens=torch.tensor([0, 3, 5]), length=9)

    @torch.compile(fullgraph=True, backend="eager")
    def numbers(cu):
        inner = masks.document(cu_seqlens=cu, length=9) & masks.causal()
        return inner.fitted_program(9, 9, torch.device("cpu"))[1], outer.fitted_program(7, 9, torch.device("cpu"))[1]

    made = numbers(torch.tensor([0, 3, 5]))
    assert torch.equal(made[0], (outer & masks.causal()).fitted_program(9, 9, torch.device("cpu"))[1])
    assert torch.equal(made[1], outer.fitted_program(7, 9, torch.device("cpu"))[1])
    assert made[1] is not outer.fitted_program(7, 9, torch.device("cpu"))[1], "kept, and its memory may be a graph's"


@pytest.mark.parametrize("mask", [masks.document(torch.tensor([0, 1, 0])), masks.causal(), masks.prefix(2)], ids=repr)
def test_others_have_no_cheaper_form(mask):
    assert mask.fitted(3, 3) is mask
    both = mask & masks.causal() & masks.dilated(2)
    assert both.fitted(3, 3) is both


def test_packed_documents_and_more_stay_a_program():
    mask = masks.causal() & masks.document(cu_seqlens=torch.tensor([0, 2, 4])) & masks.dilated(2)
    assert mask.fitted(4, 4).program("cpu")[0] == "band:0 doc:2 & dilated:4 &"


def test_a_block_mask_lists_the_blocks_that_torch_finds():
    cu_q, cu_k = torch.tensor([0, 5, 5, 14]), torch.tensor([0, 3, 8, 17])
    mask = masks.sequences(cu_q, cu_k, length_q=15, length_k=19, causal=True)
    made = mask.to_block_mask(1, 1, 15, 19, "cpu", (4, 2))
    expected = create_block_mask(mask.mask_mod_at(4), 1, 1, 15, 19, device="cpu", BLOCK_SIZE=(4, 2))
    assert torch.equal(made.to_dense(), expected.to_dense())
    assert torch.equal(made.full_kv_num_blocks, expected.full_kv_num_blocks)


def test_the_text_holds_no_number():
    for cu, length, window in (([0, 4], 4, None), ([0, 3, 9], 11, (2, 0))):
        mask = masks.sequences(torch.tensor(cu), length_q=length, window=window)
        assert mask.program("cpu")[0] == TEXT
        assert mask.band() is None


def test_extreme_windows_do_not_overflow():
    side = 2**31 - 2
    cu = torch.tensor([0, 5])
    wide = masks.sequences(cu, length_q=5, window=(side, side))
    assert wide.dense(1, 1, 5, 5).all()
    assert torch.equal(
        masks.sequences(cu, length_q=5, causal=True, window=(side, side)).dense(1, 1, 5, 5),
        masks.causal().dense(1, 1, 5, 5),
    )


@pytest.mark.parametrize(("length_q", "length_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_key_and_no_query(length_q, length_k):
    cu = torch.zeros(3, dtype=torch.int32)
    mask = masks.sequences(cu, length_q=length_q, length_k=length_k, causal=True)
    assert not mask.dense(1, 1, length_q, length_k).any()
    assert not masks.tile_table(mask, 1, 1, length_q, length_k, 2, 2).counts.any()


class Calls(TorchDispatchMode):
    """Names of what torch computed, views and allocations aside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::detach")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, (5, 2)])
def test_as_many_steps_for_any_number_of_documents(window):
    """And none that asks a tensor for a number, which would wait for a GPU."""
    found = []
    for documents in (1, 300):
        cu = torch.arange(documents + 1, dtype=torch.int32) * 2
        with Calls() as calls:
            masks.sequences(cu, length_q=700, window=window).program("cpu")
        found.append(calls.names)
    assert found[0] == found[1]
    assert "aten::_local_scalar_dense" not in found[0]
    assert len(found[0]) <= (8 if window is None else 12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda cu: masks.sequences(cu[None], length_q=4), "cu_seqlens_q"),
        (lambda cu: masks.sequences(cu[:0], length_q=4), "cu_seqlens_q"),
        (lambda cu: masks.sequences(cu.float(), length_q=4), "cu_seqlens_q"),
        (lambda cu: masks.sequences(cu, cu.bool(), length_q=4), "cu_seqlens_k"),
        (lambda cu: masks.sequences(cu, cu[:2], length_q=4), "as many documents"),
        (lambda cu: masks.sequences(cu, cu.to("meta"), length_q=4), "on one device"),
        (lambda cu: masks.sequences(cu, length_q=4, window=(-1, 0)), "left = -1"),
        (lambda cu: masks.sequences(cu, length_q=4).check(1, 1, 5, 5), "the attention has"),
    ],
)
def test_wrong_input_is_told(make, words):
    with pytest.raises(InputError, match=words):
        make(torch.tensor([0, 2, 4]))


# In kernels.


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", [None, 2])
def test_a_tile_of_a_kernel_is_the_dense_mask(side, device, transposed):
    from tests.mask.kernels import dense

    cu_q, cu_k = torch.tensor([0, 2, 2, 6, 9]), torch.tensor([0, 3, 5, 7, 7])
    for s_q, s_k in ((11, 8), (9, 14)):
        mask = masks.sequences(cu_q, cu_k, length_q=s_q, length_k=s_k, causal=True, window=(side, None))
        made = dense(mask.to(device), 1, 1, s_q, s_k, device, transposed)
        assert torch.equal(made.cpu(), mask.dense(1, 1, s_q, s_k))


@pytest.mark.parametrize("device", DEVICES)
@SEARCH
@given(problem=problems(), join=st.sampled_from(["", "&", "|"]))
def test_tables_are_those_of_torch(device, problem, join):
    (mask, *_), s_q, s_k, *blocks = problem
    if join:
        ids = masks.document(torch.arange(s_k) // 7)
        mask = mask & ids & ~mask if join == "&" else ids | mask
    assert_same_tables(mask, device, 1, 1, s_q, s_k, *blocks)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_is_made_in_a_graph_and_without_waiting():
    cu = torch.tensor([0, 300, 300, 700], dtype=torch.int32, device="cuda")

    def made():
        return masks.sequences(cu, length_q=1000, causal=True).program("cuda")[1]

    made()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        made()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made()
    cu.copy_(torch.tensor([0, 10, 500, 999], dtype=torch.int32))
    graph.replay()
    assert torch.equal(captured, made())


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("text", [TEXT, IN_A_PROGRAM])
def test_kernels_compile(arch, text):
    from tests.mask.kernels import tile
    from triton.runtime.jit import MockTensor

    from tilewright.mask import triton_tables

    data, out, counts, indices = (MockTensor(d) for d in (torch.int32, torch.int8, torch.int32, torch.int16))
    numbers = (1000, 1000, 8, 8, 128, 128)
    made = [
        tile.compile(arch, (out, data, 100, 100), (text, False, 64), num_warps=4),
        triton_tables._bounds.compile(arch, (counts, data, *numbers), (text, 128), num_warps=1),
        *(
            triton_tables._table.compile(
                arch, (counts, indices, data, counts, *numbers), (text, by_key, triton_tables.CHUNK), num_warps=8
            )
            for by_key in (False, True)
        ),
    ]
    assert all(m.binary for m in made)
    if text == TEXT:
        assert [m.info["spills"] for m in made] == [0] * len(made)
