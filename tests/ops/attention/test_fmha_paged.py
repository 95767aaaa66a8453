"""fmha_paged: tokens of a step, decoding and chunks of prefill together, see the keys of their own sequence."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.caches import check_each, problem
from tests.ops.gemm.bounds import PLACES, Place, run
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import numerics
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import contract, explain, implementations
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.attention.fmha_paged.workloads import WORKLOADS
from tilewright.ops.attention.fmha_varlen import fmha_varlen
from tilewright.ops.attention.paged.samples import int32

HALF = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
everywhere = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])
# torch's products depend on how many there are: batch invariance is a promise of our kernels
promised = pytest.mark.parametrize("place", [p for p in (*PLACES, INTERPRETER) if p.values[0].backend != "torch"])
MIXED = {"lengths": (37, 64, 90, 21), "new": (1, 2, 70, 21)}


def attend(sample, place, **options):
    return run(fmha_paged, *sample.args, **sample.kwargs, place=place, **options)


def made_and_checked(params, place, dtype=HALF):
    sample = problem(params, dtype, place.device)
    made = attend(sample, place, return_lse=True)
    check_each(made, sample)
    return made, sample


@everywhere
@pytest.mark.parametrize("page", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("behind", [0, 9])
def test_decoding_and_chunks_in_one_call(behind, page, place):
    made_and_checked({**MIXED, "page": page, "behind": behind}, place)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, place):
    made_and_checked({**MIXED, "D": 40}, place, dtype)


@everywhere
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_problem(place, data):
    page = data.draw(st.sampled_from([None, 1, 3, 16, 64]))
    side = page or 16
    length = st.one_of(st.sampled_from([0, 1, side - 1, side, side + 1, 64, 65]), st.integers(0, 150))
    lengths = tuple(data.draw(st.lists(length, min_size=1, max_size=4)))
    count = st.one_of(st.integers(0, 8), st.integers(0, 100))
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 3, 7, 16]))
    params = {
        "lengths": lengths,
        "new": tuple(data.draw(st.lists(count, min_size=len(lengths), max_size=len(lengths)))),
        "behind": data.draw(st.integers(0, 40)),
        "page": page,
        "shared": data.draw(st.integers(0, 2)),
        "H": kv_heads * group,
        "H_kv": kv_heads,
        "D_v": data.draw(st.sampled_from([None, 8, 24])),
        "causal": data.draw(st.sampled_from([None, False])),
        "window": data.draw(st.none() | st.tuples(st.integers(0, 70), st.sampled_from([0, None]))),
        "sinks": data.draw(st.booleans()),
        "softcap": data.draw(st.none() | st.just(1.5)),
    }
    dtype = HALF
    if data.draw(st.booleans()):  # of float32 queries, so that nothing is rounded
        params |= {"cache": "e4m3", "token_scales": data.draw(st.booleans())}
        dtype = torch.float32
    made_and_checked(params, place, dtype)


@everywhere
def test_a_chunk_behind_a_long_prefix_is_split(place):
    made_and_checked({"lengths": (1000, 700), "new": (40, 1), "page": 16}, place)
    made_and_checked({"lengths": (1000, 700), "new": (40, 1), "page": 16, "sinks": True, "behind": 30}, place)


@everywhere
def test_one_token_each_is_fmha_decode(place):
    """To the last bit where the tiles are the same ones."""
    sample = problem({"lengths": (70, 0, 33), "new": (1, 1, 1)}, torch.float32, place.device)
    q, k, v, _, lengths = sample.args
    wanted = run(fmha_decode, q, k, v, lengths, **sample.kwargs, place=place, return_lse=True)
    for a, b in zip(attend(sample, place, return_lse=True), wanted, strict=True):
        torch.testing.assert_close(a, b)


@everywhere
def test_a_whole_prefill_is_fmha_varlen(place):
    lengths = (40, 0, 33)
    params = {"lengths": lengths, "new": lengths, "page": 1, "unused": None}
    sample = problem(params, torch.float32, place.device)
    q, k, v, cu, lengths = sample.args
    rows = torch.cat([sample.kwargs["block_table"][b, : int(n)] for b, n in enumerate(lengths)]).long()
    o, lse = fmha_varlen(q, k[rows, 0], v[rows, 0], cu, causal=True, return_lse=True, backend="torch")
    made = attend(sample, place, return_lse=True)
    torch.testing.assert_close(made[0], o)
    torch.testing.assert_close(made[1], lse.T)


@everywhere
def test_tokens_behind_the_last_sequence_change_nothing(place):
    sample = problem({**MIXED, "behind": 30, "unused": None}, device=place.device)
    before = attend(sample, place, return_lse=True)
    sample.args[0][sum(MIXED["new"]) :] = torch.nan
    after = attend(sample, place, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_kernel_promises_batch_invariance():
    assert implementations("fmha_paged", "fwd")["triton"].batch_invariant


@promised
def test_other_sequences_leave_no_trace_under_batch_invariance(place):
    sample = problem({"lengths": (300, 41, 900), "new": (2, 41, 60), "unused": None}, device=place.device)
    q, k, v, cu, lengths = sample.args
    table = sample.kwargs["block_table"]
    with numerics("batch_invariant"):
        together = attend(sample, place, return_lse=True)
        for b in range(3):
            i, j = int(cu[b]), int(cu[b + 1])
            own = int32((0, j - i), q.device), lengths[b : b + 1]
            options = {"block_table": table[b : b + 1], "return_lse": True}
            alone = run(fmha_paged, q[i:j], k, v, *own, **options, place=place)
            assert all(torch.equal(a[i:j], c) for a, c in zip(together, alone, strict=True))
    check_each(together, sample)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_divisions(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, cu, lengths, table):
        return fmha_paged(q, k, v, cu, lengths, block_table=table, return_lse=True)

    sample = problem({"lengths": (64, 64), "new": (10, 20), "unused": None}, torch.float32)
    q, k, v, *_ = sample.args
    table = sample.kwargs["block_table"]
    for starts, numbers in (((0, 10, 30), (64, 64)), ((0, 1, 2), (3, 0)), ((0, 0, 29), (17, 60))):
        where = int32(starts, "cpu"), int32(numbers, "cpu")
        expected = fmha_paged(q, k, v, *where, block_table=table, return_lse=True)
        for a, b in zip(step(q, k, v, *where, table), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graph_serves_other_divisions_and_nothing_waits(backend):
    sample = problem({"lengths": (900, 900, 900), "new": (1, 200, 99), "unused": None}, device="cuda")
    cu, lengths = sample.args[-2:]
    fmha_paged(*sample.args, **sample.kwargs, backend=backend)
    try:
        torch.cuda.set_sync_debug_mode("error")
        fmha_paged(*sample.args, **sample.kwargs, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fmha_paged(*sample.args, **sample.kwargs, backend=backend)
    divisions = ((0, 1, 2, 3), (1, 900, 300)), ((0, 300, 300, 300), (300, 0, 5)), ((0, 9, 99, 280), (9, 9, 9))
    for starts, numbers in divisions:
        cu.copy_(int32(starts, "cuda"))
        lengths.copy_(int32(numbers, "cuda"))
        graph.replay()
        assert torch.equal(captured, fmha_paged(*sample.args, **sample.kwargs, backend=backend))


def test_no_step_asks_for_a_number():
    with FakeTensorMode(), torch.no_grad():
        sample = problem({**MIXED, "behind": 3, "unused": None})
        o, lse = fmha_paged(*sample.args, **sample.kwargs, return_lse=True)
    assert o.shape == (97, 4, 16)
    assert lse.shape == (97, 4)


def test_gradients_are_refused_by_name():
    sample = problem({**MIXED, "unused": None})
    sample.args[1].requires_grad_()
    with pytest.raises(InputError, match="fmha_paged: attention over a KV cache has no gradient"):
        fmha_paged(*sample.args, **sample.kwargs)


def test_explain():
    sample = problem({**MIXED, "sinks": True})
    said = explain("fmha_paged", *sample.args, **sample.kwargs)
    assert said.bucket == ("B=4,T=128,keys=128,S_q=0,H_kv=2,group=2,D=16,D_v=16,page=16,cache=0,extras=4,aligned=1")


@pytest.mark.compile
@pytest.mark.parametrize("row", WORKLOADS, ids=lambda row: row.name)
def test_kernels_of_workloads_are_without_fault(row):
    from tests.harness.cases import raw_call
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    subject = contract("fmha_paged")
    call = raw_call(subject, subject.forward, row.name, row.params, HALF)
    found = implementations("fmha_paged", "fwd")["triton"]
    bucket = subject.forward.bucket_of(call.args, "default")
    with target("sm_90") as compiled:
        found.launch(call.outputs(), *call.args, config=found.configure(bucket, HALF))
    assert {kernel.name for kernel in compiled} == {"attend_kernel", "combine_kernel"}
    for kernel in compiled:
        assert [fault for fault in resources(kernel).faults() if "attend" in fault or "spills" in fault] == []


# What the bench measures.


def test_cost_counts_what_is_visible():
    subject = contract("fmha_paged")
    sizes = {"H": 4, "H_kv": 2, "D": 8, "lengths": (20, 5), "new": (2, 3), "behind": 4, "page": 4}
    sample = subject.inputs(sizes, torch.float32, CPU, 0)
    assert subject.cost(sample, "fwd").flops == 4 * 8 * 4 * (19 + 20 + 3 + 4 + 5)


def test_who_competes():
    subject = contract("fmha_paged")
    assert {peer.name for peer in declared_peers(subject, GPU)} == {"sdpa_loop", "flashinfer"}
    assert {peer.name for peer in declared_peers(subject, CPU)} == {"eager", "compile"}


def test_the_loop_of_torch_is_the_reference():
    subject = contract("fmha_paged")
    (loop,) = [peer for peer in declared_peers(subject, GPU) if peer.name == "sdpa_loop"]
    sizes = {"H": 4, "H_kv": 2, "D": 8, "lengths": (20, 5, 9), "new": (2, 1, 9), "page": 4}
    sample = subject.inputs(sizes, torch.float32, CPU, 0)
    torch.testing.assert_close(loop.make(sample)(), subject.reference(*sample.args, **sample.kwargs))
    assert loop.make(subject.inputs({**sizes, "sinks": True}, torch.float32, CPU, 0)) is None
