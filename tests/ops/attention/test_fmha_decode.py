"""fmha_decode: new tokens over a cache see the keys of their sequence, wherever its pages lie, and nothing else."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.caches import check_each, keys_of, problem
from tests.ops.gemm.bounds import PLACES, Place, run
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import numerics
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import Workload, contract, explain, implementations
from tilewright.errors import InputError
from tilewright.ops.attention.fmha import fmha
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_decode.workloads import WORKLOADS
from tilewright.ops.attention.merge_states import merge_states
from tilewright.ops.attention.paged.samples import TAIL, int32

HALF = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
everywhere = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])
# torch's products depend on how many there are: batch invariance is a promise of our kernels
promised = pytest.mark.parametrize("place", [p for p in (*PLACES, INTERPRETER) if p.values[0].backend != "torch"])
RAGGED = (37, 1, 64, 21)


def decode(sample, place, **options):
    return run(fmha_decode, *sample.args, **sample.kwargs, place=place, **options)


def made_and_checked(params, place, dtype=HALF, **options):
    sample = problem(params, dtype, place.device)
    made = decode(sample, place, return_lse=True, **options)
    check_each(made, sample)
    return made, sample


@everywhere
@pytest.mark.parametrize("page", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_every_sequence_sees_its_own_keys(tokens, page, place):
    made_and_checked({"lengths": RAGGED, "page": page, "S_q": tokens}, place)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, place):
    made_and_checked({"lengths": RAGGED, "D": 40}, place, dtype)


@everywhere
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_problem(place, data):
    page = data.draw(st.sampled_from([None, 1, 3, 16, 64]))
    side = page or 16
    length = st.one_of(st.sampled_from([0, 1, side - 1, side, side + 1, 64, 65]), st.integers(0, 80))
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 3, 7, 16]))
    params = {
        "lengths": tuple(data.draw(st.lists(length, min_size=1, max_size=4))),
        "page": page,
        "shared": data.draw(st.integers(0, 2)),
        "H": kv_heads * group,
        "H_kv": kv_heads,
        "S_q": data.draw(st.none() | st.integers(1, 8)),
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


GRID = [(b, s_q, s_k, h_q, h_kv) for b in (1, 2, 6) for s_q in (1, 2, 4) for s_k in (20, 140, 4096)
        for h_q, h_kv in ((1, 1), (3, 3), (9, 3), (64, 8), (64, 2))]  # fmt: skip


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_sizes_of_flash_mla(sizes, place):
    batch, tokens, keys, heads, kv_heads = sizes
    lengths = tuple(max(keys - 37 * b, 0) for b in range(batch))
    made_and_checked({"lengths": lengths, "S_q": tokens, "H": heads, "H_kv": kv_heads, "D": 64, "page": 64}, place)


@pytest.mark.interp
@pytest.mark.parametrize("sizes", [(2, 4, 140, 9, 3), (1, 2, 600, 64, 2), (6, 1, 20, 3, 3)], ids=str)
def test_sizes_of_flash_mla_in_the_interpreter(sizes):
    batch, tokens, keys, heads, kv_heads = sizes
    lengths = tuple(max(keys - 37 * b, 0) for b in range(batch))
    params = {"lengths": lengths, "S_q": tokens, "H": heads, "H_kv": kv_heads, "page": 64}
    made_and_checked(params, Place("cpu", "triton"))


@everywhere
def test_mixed_lengths_are_split_and_combined(place):
    """Row tiles with several chunks beside such with one, and one without keys."""
    made_and_checked({"lengths": (900, 1, 0, 140), "S_q": 2, "page": 16}, place)
    made_and_checked({"lengths": (900, 1, 0, 140), "S_q": 2, "page": 16, "sinks": True, "window": (600, 0)}, place)


@pytest.mark.interp
def test_more_chunks_than_the_second_kernel_reads_at_once(monkeypatch):
    from tilewright.ops.attention.kernels.triton.paged import launch

    monkeypatch.setattr(launch, "_CPU_PROCESSORS", 48)
    made_and_checked({"lengths": (1500, 30), "H": 2, "H_kv": 1, "sinks": True}, Place("cpu", "triton"))


@everywhere
def test_nothing_is_read_behind_a_length_nor_before_a_window(place):
    """Other values there, NaN or not, and other entries of the table leave the same bits."""
    sample = problem({"lengths": (37, 5, 70), "page": 4, "window": (9, 0), "S_q": 2}, device=place.device)
    before = decode(sample, place, return_lse=True)
    _, k_cache, v_cache, lengths = sample.args
    table = sample.kwargs["block_table"]
    assert bool((table == TAIL).any())
    kept = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=k_cache.device)
    for b, n in enumerate(lengths.tolist()):
        first = max(n - 2 - 9, 0)
        for i in range(first, n):
            kept[table[b, i // 4], i % 4] = True
        table[b, : first // 4] = TAIL  # pages that the window has left
    for cache in (k_cache, v_cache):
        cache[~kept] = torch.inf
    after = decode(sample, place, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@everywhere
def test_one_token_is_fmha_over_gathered_keys(place):
    sample = problem({"lengths": (70, 70), "S_q": 3, "page": 3, "D": 32}, torch.float32, place.device)
    o, lse = decode(sample, place, return_lse=True)
    q, k_cache, v_cache, _ = sample.args
    for b in range(2):
        k, v = (keys_of(sample, b, cache, None) for cache in (k_cache, v_cache))
        wanted = fmha(q[b].transpose(0, 1)[None], k, v, causal=True, return_lse=True, backend="torch")
        torch.testing.assert_close(o[b].transpose(0, 1)[None], wanted[0])
        torch.testing.assert_close(lse[b].T[None], wanted[1])


@everywhere
def test_a_longer_length_than_the_capacity_counts_as_the_capacity(place):
    sample = problem({"lengths": (30, 32), "page": 16, "unused": None}, device=place.device)
    sample.kwargs["block_table"] = sample.kwargs["block_table"][:, :2]
    sample.args[-1].fill_(32)
    wanted = decode(sample, place)
    sample.args[-1].fill_(1 << 30)
    assert torch.equal(decode(sample, place), wanted)


@everywhere
def test_states_merge_as_they_are(place):
    """Two halves of the keys, attended to without a mask, are all of them: cascades."""
    sample = problem({"lengths": (64, 50), "page": None, "unused": None}, torch.float32, place.device)
    q, k, v, lengths = sample.args
    whole = decode(sample, place, return_lse=True)
    parts = []
    for i, j in ((0, 32), (32, 64)):
        own = (lengths - i).clamp(0, 32)
        parts.append(run(fmha_decode, q, k[:, i:j], v[:, i:j], own, place=place, return_lse=True))
    for a, b in zip(merge_states(*zip(*parts, strict=True), backend="torch"), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_the_kernel_promises_batch_invariance():
    assert implementations("fmha_decode", "fwd")["triton"].batch_invariant


@promised
def test_other_sequences_leave_no_trace_under_batch_invariance(place):
    sample = problem({"lengths": (300, 41, 900), "page": 16, "unused": None}, device=place.device)
    q, k, v, lengths = sample.args
    table = sample.kwargs["block_table"]
    with numerics("batch_invariant"):
        together = decode(sample, place, return_lse=True)
        for b in range(3):
            rows = slice(b, b + 1)
            options = {"block_table": table[rows], "return_lse": True}
            alone = run(fmha_decode, q[rows], k, v, lengths[rows], place=place, **options)
            assert all(torch.equal(a[rows], c) for a, c in zip(together, alone, strict=True))
    check_each(together, sample)


@everywhere
def test_strides_of_caches(place):
    """One tensor for both, and heads before slots, as other libraries lay them out."""
    sample = problem({"lengths": RAGGED, "D": 32}, device=place.device)
    q, k, v, lengths = sample.args
    wanted = decode(sample, place)
    both = torch.stack((k, v), 1)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    table = torch.nn.functional.pad(sample.kwargs["block_table"], (0, 3))[:, :-3]
    for caches in ((both[:, 0], both[:, 1]), by_head):
        assert torch.equal(run(fmha_decode, q, *caches, lengths, block_table=table, place=place), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_lengths(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, lengths, table):
        return fmha_decode(q, k, v, lengths, block_table=table, return_lse=True)

    sample = problem({"lengths": (64, 64), "unused": None}, torch.float32)
    q, k, v, _ = sample.args
    table = sample.kwargs["block_table"]
    for numbers in ((64, 64), (3, 0), (17, 60)):
        lengths = int32(numbers, "cpu")
        expected = fmha_decode(q, k, v, lengths, block_table=table, return_lse=True)
        for a, b in zip(step(q, k, v, lengths, table), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graph_serves_other_lengths_and_nothing_waits(backend):
    sample = problem({"lengths": (900, 900, 900), "unused": None}, device="cuda")
    lengths = sample.args[-1]
    fmha_decode(*sample.args, **sample.kwargs, backend=backend)
    try:
        torch.cuda.set_sync_debug_mode("error")
        fmha_decode(*sample.args, **sample.kwargs, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fmha_decode(*sample.args, **sample.kwargs, backend=backend)
    for numbers in ((1, 900, 300), (0, 0, 5), (900, 64, 65)):
        lengths.copy_(int32(numbers, "cuda"))
        graph.replay()
        assert torch.equal(captured, fmha_decode(*sample.args, **sample.kwargs, backend=backend))


def test_no_step_asks_for_a_number():
    with FakeTensorMode(), torch.no_grad():
        sample = problem({"lengths": RAGGED, "S_q": 2, "unused": None})
        o, lse = fmha_decode(*sample.args, **sample.kwargs, return_lse=True)
    assert o.shape == (4, 2, 4, 16)
    assert lse.shape == (4, 2, 4)


def test_gradients_are_refused_by_name():
    sample = problem({"lengths": RAGGED, "unused": None})
    sample.args[0].requires_grad_()
    with pytest.raises(InputError, match="fmha_decode: attention over a KV cache has no gradient"):
        fmha_decode(*sample.args, **sample.kwargs)


def test_explain():
    sample = problem({"lengths": RAGGED, "S_q": 2, "window": (4, 0)})
    said = explain("fmha_decode", *sample.args, **sample.kwargs)
    assert said.bucket == ("B=4,T=8,keys=128,S_q=2,H_kv=2,group=2,D=16,D_v=16,page=16,cache=0,extras=8,aligned=1")


NARROW = [Workload(f"d_{d}_page_{page}", {"H": 16, "H_kv": 1, "S_q": 4, "D": d, "page": page, "lengths": (90, 3)})
          for d in (16, 32, 64) for page in (None, 16)]  # fmt: skip


# Two registers of a thread, where 32 contiguous sequences make another tile; on Hopper CUDA C++ runs these
SPILLING = {"32x32/8x512x128", "32x32/8x4096x128"}


@pytest.mark.compile
@pytest.mark.parametrize("row", [*WORKLOADS, *NARROW], ids=lambda row: row.name)
def test_kernels_are_without_fault(row):
    """No spill but those known; no register that nothing wrote, as ptxas leaves in WGMMA of more keys than columns."""
    from tests.harness.cases import raw_call
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    subject = contract("fmha_decode")
    call = raw_call(subject, subject.forward, row.name, row.params, HALF)
    found = implementations("fmha_decode", "fwd")["triton"]
    bucket = subject.forward.bucket_of(call.args, "default")
    with target("sm_90") as compiled:
        found.launch(call.outputs(), *call.args, config=found.configure(bucket, HALF))
    assert {kernel.name for kernel in compiled} == {"attend_kernel", "combine_kernel"}
    known = ["attend_kernel spills 8 at 96 registers"] if row.name in SPILLING else []
    faults = [fault for kernel in compiled for fault in resources(kernel).faults()]
    assert [fault for fault in faults if "attend" in fault or "spills" in fault] == known


# What the bench measures.


def test_cost_counts_what_is_visible():
    subject = contract("fmha_decode")
    sizes = {"H": 4, "H_kv": 2, "D": 8, "lengths": (20, 3, 0), "S_q": 2, "page": 4}
    for window, pairs, keys in ((None, 19 + 20 + 2 + 3, 23), ((4, 0), 5 + 5 + 2 + 3, 6 + 3)):
        sample = subject.inputs({**sizes, "window": window}, torch.float32, CPU, 0)
        cost = subject.cost(sample, "fwd")
        assert cost.flops == 4 * 8 * 4 * pairs
        q, *_, lengths = sample.args
        indices = 4 * (lengths.numel() + sample.kwargs["block_table"].numel())
        assert cost.bytes_read == q.numel() * 4 + keys * 2 * 16 * 4 + indices


def test_who_competes():
    subject = contract("fmha_decode")
    flashinfer = {"flashinfer", "flashinfer_cuda_cores", "flashinfer_prefill"}
    assert {peer.name for peer in declared_peers(subject, GPU)} == {"cudnn", "flash", *flashinfer}
    assert {peer.name for peer in declared_peers(subject, CPU)} == {"eager", "compile"}
