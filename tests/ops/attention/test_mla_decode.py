"""mla_decode: all heads of a new token see the latents of its sequence, or those that it names, and nothing else."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.latents import MODEL, check_each, problem, slots_of, tokens_of
from tests.ops.gemm.bounds import PLACES, Place, run
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import numerics
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import contract, explain, implementations
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.merge_states import merge_states
from tilewright.ops.attention.mla_decode import mla_decode
from tilewright.ops.attention.paged.samples import TAIL, int32

HALF = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
everywhere = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])
# torch's products depend on how many there are: batch invariance is a promise of our kernels
promised = pytest.mark.parametrize("place", [p for p in (*PLACES, INTERPRETER) if p.values[0].backend != "torch"])
RAGGED = (37, 1, 64, 21)


def decode(sample, place, **options):
    return run(mla_decode, *sample.args, **sample.kwargs, place=place, **options)


def made_and_checked(params, place, dtype=HALF, **options):
    sample = problem(params, dtype, place.device)
    made = decode(sample, place, return_lse=True, **options)
    check_each(made, sample)
    return made, sample


@everywhere
@pytest.mark.parametrize("page", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_every_sequence_sees_its_own_latents(tokens, page, place):
    made_and_checked({"lengths": RAGGED, "page": page, "S_q": tokens}, place)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, place):
    made_and_checked({"lengths": RAGGED, "D": 40}, place, dtype)


@everywhere
@pytest.mark.parametrize("cache", [None, "e4m3"])
@pytest.mark.parametrize("heads", [3, 64])
def test_widths_of_deepseek(heads, cache, place):
    made_and_checked({**MODEL, "H": heads, "lengths": (70, 0, 9), "cache": cache, "sinks": True, "S_q": 2}, place)


@everywhere
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_problem(place, data):
    page = data.draw(st.sampled_from([None, 1, 3, 16, 64]))
    side = page or 16
    length = st.one_of(st.sampled_from([0, 1, side - 1, side, side + 1, 64, 65]), st.integers(0, 80))
    lengths = tuple(data.draw(st.lists(length, min_size=1, max_size=4)))
    d = data.draw(st.sampled_from([16, 24, 48]))
    params = {
        "lengths": lengths,
        "page": page,
        "shared": data.draw(st.integers(0, 2)),
        "H": data.draw(st.sampled_from([1, 2, 3, 7, 16, 65])),
        "D": d,
        "d_v": data.draw(st.sampled_from([1, 8, d])),
        "S_q": data.draw(st.none() | st.integers(1, 8)),
        "causal": data.draw(st.sampled_from([None, False])),
        "scale": data.draw(st.sampled_from([None, -0.2])),
        "sinks": data.draw(st.booleans()),
    }
    if data.draw(st.booleans()):
        count = st.integers(0, 30)
        params["topk"] = data.draw(st.sampled_from([1, 17, 40]))
        params["topk_lengths"] = data.draw(st.none() | st.tuples(*[count for _ in lengths]))
    made_and_checked(params, place)


GRID = [(b, s_q, s_k, h) for b in (1, 2, 6) for s_q in (1, 2, 4) for s_k in (20, 140, 4096)
        for h in (1, 3, 9, 63, 64, 126, 128)]  # fmt: skip
LARGE = [(64, s_q, s_k, h) for s_q, s_k, h in ((1, 140, 128), (2, 4096, 64), (4, 20, 9))]


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("sizes", [*GRID, *LARGE], ids=str)
def test_sizes_of_flash_mla(sizes, place):
    batch, tokens, keys, heads = sizes
    lengths = tuple(max(keys - 37 * b, 0) for b in range(batch))
    made_and_checked({**MODEL, "lengths": lengths, "S_q": tokens, "H": heads, "page": 64}, place)


@pytest.mark.interp
@pytest.mark.parametrize("sizes", [(2, 4, 140, 9), (1, 2, 300, 64), (6, 1, 20, 3)], ids=str)
def test_sizes_of_flash_mla_in_the_interpreter(sizes):
    batch, tokens, keys, heads = sizes
    lengths = tuple(max(keys - 37 * b, 0) for b in range(batch))
    made_and_checked({"lengths": lengths, "S_q": tokens, "H": heads, "page": 64}, Place("cpu", "triton"))


@everywhere
def test_mixed_lengths_are_cut_and_combined(place):
    """Sequences of several segments beside such of one, and one without keys."""
    made_and_checked({"lengths": (900, 1, 0, 140), "S_q": 2}, place)
    made_and_checked({"lengths": (900, 1, 0, 140), "S_q": 2, "sinks": True, "H": 40}, place)


@pytest.mark.interp
@pytest.mark.parametrize("lengths", [(1500, 30), (64, 64, 64, 64, 1), (700,), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("processors", [1, 3, 48])
def test_any_number_of_parts(processors, lengths, monkeypatch):
    """More parts than key tiles, more segments than the second kernel reads at once, a share for all."""
    from tilewright.ops.attention.kernels.triton.paged import launch

    monkeypatch.setattr(launch, "_CPU_PROCESSORS", processors)
    made_and_checked({"lengths": lengths, "H": 2, "sinks": True}, Place("cpu", "triton"))


@everywhere
def test_nothing_is_read_behind_a_length(place):
    """Other values there, NaN or not, and other entries of the table leave the same bits."""
    sample = problem({"lengths": (37, 5, 70), "page": 4, "S_q": 2}, device=place.device)
    before = decode(sample, place, return_lse=True)
    cache, table = sample.args[1], sample.kwargs["block_table"]
    assert bool((table == TAIL).any())
    used = [slot for b in range(3) for slot in slots_of(sample, b)]
    kept = torch.zeros(cache.shape[0] * cache.shape[1], dtype=torch.bool, device=cache.device)
    kept[torch.tensor(used, device=cache.device)] = True
    cache[~kept.view(cache.shape[:2])] = torch.inf
    table[table == TAIL] = -5
    after = decode(sample, place, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@everywhere
@pytest.mark.parametrize("page", [None, 3])
def test_it_is_multi_query_attention(page, place):
    sample = problem({"lengths": RAGGED, "S_q": 2, "page": page, "unused": None}, torch.float32, place.device)
    q, cache, lengths = sample.args
    wanted = fmha_decode(
        q, cache[:, :, None], cache[:, :, None, :32], lengths, block_table=sample.kwargs.get("block_table"),
        return_lse=True, backend="torch",
    )  # fmt: skip
    for a, b in zip(decode(sample, place, return_lse=True), wanted, strict=True):
        torch.testing.assert_close(a, b)


@everywhere
def test_indices_may_name_all_tokens(place):
    """In any order, and what is no slot stands for none."""
    dense = problem({"lengths": (37, 5), "page": 4}, torch.float32, place.device)
    q, cache, _ = dense.args
    indices = torch.full((2, 1, 60), -1, dtype=torch.int32)
    for b in range(2):
        slots = slots_of(dense, b)[::-1]
        places = torch.randperm(60)[: len(slots)]
        indices[b, 0, places] = torch.tensor(slots, dtype=torch.int32)
    indices[0, 0, indices[0, 0] < 0] = cache.shape[0] * cache.shape[1]
    wanted = decode(dense, place, return_lse=True)
    made = run(mla_decode, q, cache, indices=indices.to(q.device), d_v=32, return_lse=True, place=place)
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b)


@everywhere
def test_a_slot_that_is_named_twice_counts_twice(place):
    sample = problem({"lengths": (5,), "page": 4}, torch.float32, place.device)
    q, cache, _ = sample.args
    slots = slots_of(sample, 0)
    named = [slots[0], slots[3], slots[0]]
    indices = int32(named, q.device, (1, 1, 3))
    o, lse = run(mla_decode, q, cache, indices=indices, d_v=32, return_lse=True, place=place)
    tokens = tokens_of(sample, named).double()
    s = q[0].double() @ tokens.T * 48**-0.5
    torch.testing.assert_close(lse[0], torch.logsumexp(s, -1).float())
    torch.testing.assert_close(o[0], (torch.softmax(s, -1) @ tokens[:, :32]).float())


@everywhere
def test_a_longer_length_than_the_capacity_counts_as_the_capacity(place):
    sample = problem({"lengths": (30, 32), "unused": None}, device=place.device)
    sample.kwargs["block_table"] = sample.kwargs["block_table"][:, :2]
    sample.args[-1].fill_(32)
    wanted = decode(sample, place)
    sample.args[-1].fill_(1 << 30)
    assert torch.equal(decode(sample, place), wanted)


@everywhere
def test_states_merge_as_they_are(place):
    sample = problem({"lengths": (64, 50), "page": None, "unused": None}, torch.float32, place.device)
    q, cache, lengths = sample.args
    whole = decode(sample, place, return_lse=True)
    parts = []
    for i, j in ((0, 32), (32, 64)):
        own = (lengths - i).clamp(0, 32)
        parts.append(run(mla_decode, q, cache[:, i:j], own, d_v=32, place=place, return_lse=True))
    for a, b in zip(merge_states(*zip(*parts, strict=True), backend="torch"), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_the_kernel_promises_batch_invariance():
    assert implementations("mla_decode", "fwd")["triton"].batch_invariant


@promised
@pytest.mark.parametrize("topk", [None, 300])
def test_other_sequences_leave_no_trace_under_batch_invariance(topk, place):
    sample = problem({"lengths": (600, 41, 900), "S_q": 2, "topk": topk, "unused": None}, device=place.device)
    q, cache, lengths = sample.args
    with numerics("batch_invariant"):
        together = decode(sample, place, return_lse=True)
        for b in range(3):
            own = slice(b, b + 1)
            names = ("block_table", "indices")
            options = {name: sample.kwargs[name][own] for name in names if name in sample.kwargs}
            keys = None if lengths is None else lengths[own]
            alone = run(mla_decode, q[own], cache, keys, d_v=32, place=place, return_lse=True, **options)
            assert all(torch.equal(a[own], c) for a, c in zip(together, alone, strict=True))
    check_each(together, sample)


@everywhere
def test_strides_and_forms_of_caches(place):
    """A dimension for one head, columns of a wider tensor, float8 for bytes, a table within another."""
    sample = problem({"lengths": RAGGED}, device=place.device)
    q, cache, lengths = sample.args
    wanted = decode(sample, place)
    wide = torch.cat((cache, torch.full_like(cache, torch.nan)), -1)[..., :48]
    table = torch.nn.functional.pad(sample.kwargs["block_table"], (0, 3))[:, :-3]
    for form in (cache[:, :, None], wide):
        assert torch.equal(run(mla_decode, q, form, lengths, block_table=table, d_v=32, place=place), wanted)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(mla_decode, by_head, cache, lengths, block_table=table, d_v=32, place=place), wanted)
    packed = problem({**MODEL, "lengths": (21, 3), "cache": "e4m3"}, device=place.device)
    wanted = decode(packed, place)
    q, cache, lengths = packed.args
    table = packed.kwargs["block_table"]
    for form in (cache.view(torch.float8_e4m3fn), cache[:, :, None]):
        assert torch.equal(run(mla_decode, q, form, lengths, block_table=table, place=place), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_lengths(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, cache, lengths, table):
        return mla_decode(q, cache, lengths, block_table=table, d_v=32, return_lse=True)

    sample = problem({"lengths": (64, 64), "unused": None}, torch.float32)
    q, cache, _ = sample.args
    table = sample.kwargs["block_table"]
    for numbers in ((64, 64), (3, 0), (17, 60)):
        lengths = int32(numbers, "cpu")
        expected = mla_decode(q, cache, lengths, block_table=table, d_v=32, return_lse=True)
        for a, b in zip(step(q, cache, lengths, table), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("cache", [None, "e4m3"])
def test_a_graph_serves_other_lengths_and_tables_and_nothing_waits(cache, place):
    sample = problem({**MODEL, "H": 16, "lengths": (900, 900, 900), "cache": cache, "unused": None}, device="cuda")
    lengths, table = sample.args[-1], sample.kwargs["block_table"]
    decode(sample, place)
    try:
        torch.cuda.set_sync_debug_mode("error")
        decode(sample, place)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(sample, place)
    for numbers in ((1, 900, 300), (0, 0, 5), (900, 64, 65)):
        lengths.copy_(int32(numbers, "cuda"))
        table.copy_(table.flip(0))
        graph.replay()
        assert torch.equal(captured, decode(sample, place))


def test_no_step_asks_for_a_number():
    with FakeTensorMode(), torch.no_grad():
        sample = problem({"lengths": RAGGED, "S_q": 2, "unused": None})
        o, lse = mla_decode(*sample.args, **sample.kwargs, return_lse=True)
    assert o.shape == (4, 2, 4, 32)
    assert lse.shape == (4, 2, 4)


def test_gradients_are_refused_by_name():
    sample = problem({"lengths": RAGGED, "unused": None})
    sample.args[0].requires_grad_()
    with pytest.raises(InputError, match="mla_decode: attention over a KV cache has no gradient"):
        mla_decode(*sample.args, **sample.kwargs)


def test_explain():
    sample = problem({"lengths": RAGGED, "S_q": 2})
    said = explain("mla_decode", *sample.args, **sample.kwargs)
    assert said.bucket == "B=4,S_q=2,keys=128,H=4,D=48,D_v=32,page=16,cache=0,sparse=0,extras=0,aligned=1,plain=1"


# What the bench measures.


def test_cost_counts_what_is_visible():
    subject = contract("mla_decode")
    sizes = {"H": 4, "D": 48, "d_v": 32, "lengths": (20, 3, 0), "S_q": 2, "page": 4}
    sample = subject.inputs(sizes, torch.float32, CPU, 0)
    cost = subject.cost(sample, "fwd")
    assert cost.flops == 2 * (48 + 32) * 4 * (19 + 20 + 2 + 3)
    q, _, lengths = sample.args
    assert cost.bytes_read == 4 * (q.numel() + 23 * 48 + lengths.numel() + sample.kwargs["block_table"].numel())
    assert cost.bytes_written == 4 * 3 * 2 * 4 * (32 + 1)


def test_cost_counts_a_slot_once_that_is_named_often():
    subject = contract("mla_decode")
    sample = subject.inputs({"H": 4, "D": 48, "d_v": 32, "lengths": (1,), "topk": 9}, torch.float32, CPU, 0)
    q, _, _ = sample.args
    pairs = int((sample.kwargs["indices"] >= 0).sum())
    cost = subject.cost(sample, "fwd")
    assert cost.flops == 2 * (48 + 32) * 4 * pairs
    assert cost.bytes_read == 4 * (q.numel() + 48 + 9)


def test_who_competes():
    subject = contract("mla_decode")
    assert {peer.name for peer in declared_peers(subject, GPU)} == {"matmul", "flashinfer"}
    assert {peer.name for peer in declared_peers(subject, CPU)} == {"eager", "compile"}
