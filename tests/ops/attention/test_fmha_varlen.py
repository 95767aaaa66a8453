"""fmha_varlen: each sequence is an attention of its own, whatever their lengths; nothing waits for cu_seqlens."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.bounds import check, problem
from tests.ops.gemm.bounds import PLACES, Place, run
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import mask as masks
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import contract, explain, implementations, record
from tilewright.errors import BackendError, InputError
from tilewright.ops.attention import score
from tilewright.ops.attention.fmha import fmha
from tilewright.ops.attention.fmha_varlen import fmha_varlen
from tilewright.ops.attention.fmha_varlen.samples import LONGER, RAGGED, SHORTER, boundaries
from tilewright.ops.attention.fmha_varlen.workloads import WORKLOADS, by_octaves, uniform

HALF = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
on_every_place = pytest.mark.parametrize("place", PLACES)
# The same properties in Triton's interpreter, which has processes of its own
WITH_INTERPRETER = [*PLACES, pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)]
everywhere = pytest.mark.parametrize("place", WITH_INTERPRETER)


def packed(lengths, lengths_k=None, *, heads=4, kv_heads=2, d=64, d_v=None, behind=0, dtype=HALF, device="cpu"):
    """q, k, v of tokens and both cu_seqlens; cu_seqlens_k None where keys are packed like queries."""
    tokens, keys = sum(lengths) + behind, sum(lengths_k or lengths) + behind
    made = problem(1, heads, kv_heads, tokens, keys, d, d_v, dtype=dtype, device=device)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in made)
    return q, k, v, boundaries(lengths, device), None if lengths_k is None else boundaries(lengths_k, device)


def check_each(made, q, k, v, lengths, lengths_k=None, *, window=None, **options):
    """Every sequence by the formula in float64; tokens behind them by what is promised."""
    o, lse = made
    assert o.shape == (*q.shape[:2], v.shape[2])
    assert lse.shape == (q.shape[1], q.shape[0])
    options["mask"] = None if window is None else masks.window(*window)
    i = j = 0
    for n, m in zip(lengths, lengths_k or lengths, strict=True):
        if n:
            own = [t[None].transpose(1, 2) for t in (q[i : i + n], k[j : j + m], v[j : j + m])]
            check((o[i : i + n][None].transpose(1, 2), lse[None, :, i : i + n]), *own, return_lse=True, **options)
        i, j = i + n, j + m
    assert not o[i:].any()
    sinks = options.get("sinks")
    nothing = torch.full_like(lse[:, i:], -torch.inf) if sinks is None else sinks[:, None].expand_as(lse[:, i:])
    torch.testing.assert_close(lse[:, i:], nothing)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths_k", [None, LONGER, SHORTER], ids=["same", "longer", "shorter"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (20, 3)}, {"window": (20, None), "causal": True}
], ids=str)  # fmt: skip
def test_every_sequence_is_an_attention_of_its_own(options, lengths_k, dtype, place):
    q, k, v, *cu = packed(RAGGED, lengths_k, behind=11, dtype=dtype, device=place.device)
    made = run(fmha_varlen, q, k, v, *cu, place=place, return_lse=True, **options)
    check_each(made, q, k, v, RAGGED, lengths_k, **options)


@everywhere
@pytest.mark.parametrize(
    ("lengths", "lengths_k"),
    [
        ((0, 0, 70, 0), None),
        ((1,) * 40, None),
        ((30, 0, 12), (0, 50, 12)),
        ((), None),
        ((3, 200), (140, 1)),
    ],
    ids=["empty", "one_each", "one_side", "none", "few_and_many"],
)
def test_odd_lengths(lengths, lengths_k, place):
    q, k, v, *cu = packed(lengths, lengths_k, behind=7, device=place.device)
    made = run(fmha_varlen, q, k, v, *cu, place=place, return_lse=True, causal=True)
    check_each(made, q, k, v, lengths, lengths_k, causal=True)


@on_every_place
def test_no_tokens(place):
    q, k, v, *cu = packed((0, 0), device=place.device)
    o, lse = run(fmha_varlen, q, k, v, *cu, place=place, return_lse=True)
    assert o.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


@on_every_place
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_every_modifier(with_alibi, softcap, with_sinks, place):
    q, k, v, *cu = packed(RAGGED, behind=5, device=place.device)
    options = {"causal": True, "softcap": softcap, "scale": 0.3}
    if with_alibi:
        options["score_mod"] = score.alibi(score.alibi_slopes(4, place.device))
    if with_sinks:
        options["sinks"] = 2 * torch.randn(4, device=place.device)
    made = run(fmha_varlen, q, k, v, *cu, place=place, return_lse=True, **options)
    check_each(made, q, k, v, RAGGED, **options)


@everywhere
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_lengths(place, data):
    length = st.one_of(st.integers(0, 20), st.sampled_from([31, 63, 64, 65, 128, 129]))
    lengths = data.draw(st.lists(length, max_size=5))
    lengths_k = data.draw(st.none() | st.lists(length, min_size=len(lengths), max_size=len(lengths)))
    group = data.draw(st.integers(1, 3))
    behind = data.draw(
        st.integers(0 if sum(lengths if lengths_k is None else lengths_k) else 1, 3)
    )  # kernels need keys
    q, k, v, *cu = packed(lengths, lengths_k, heads=2 * group, behind=behind, d=16, device=place.device)
    side = st.none() | st.integers(0, 70)
    options = {"causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.tuples(side, side))}
    if data.draw(st.booleans()):
        options["sinks"] = torch.randn(2 * group, device=place.device)
    made = run(fmha_varlen, q, k, v, *cu, place=place, return_lse=True, **options)
    check_each(made, q, k, v, lengths, lengths_k, **options)


@everywhere
def test_gradients_stay_in_their_sequence(place):
    """A cotangent of one sequence gives that sequence's gradients, and zeros in all others and behind."""
    q, k, v, *cu = packed(RAGGED, LONGER, behind=9, device=place.device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o, lse = run(fmha_varlen, *leaves, *cu, place=place, causal=True, return_lse=True)
    queries, keys = (slice(sum(lengths[:2]), sum(lengths[:3])) for lengths in (RAGGED, LONGER))
    do, dlse = torch.zeros_like(o), torch.zeros_like(lse)
    do[queries], dlse[:, queries] = torch.randn_like(o[queries]), torch.randn_like(lse[:, queries])
    do[sum(RAGGED) :] = 3.0  # of tokens behind
    grads = torch.autograd.grad((o, lse), leaves, (do, dlse))
    own = [t.detach()[part][None].requires_grad_() for t, part in zip(leaves, (queries, keys, keys), strict=True)]
    alone = fmha(*own, causal=True, return_lse=True, layout="BSHD", backend="torch")
    wanted = torch.autograd.grad(alone, own, (do[queries][None], dlse[None, :, queries]))
    for got, expected, part in zip(grads, wanted, (queries, keys, keys), strict=True):
        rest = got.clone()
        rest[part] = 0
        assert not rest.any()
        difference = (got[part].double() - expected[0].double()).norm()
        assert difference <= 6 * torch.finfo(HALF).eps * expected.double().norm()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 1)}, {"softcap": 1.5}], ids=str)
def test_finite_differences(options, with_sinks):
    q, k, v, *cu = packed((3, 0, 4), (5, 2, 1), d=3, d_v=2, behind=1, dtype=torch.float64)
    sinks = [torch.randn(4, dtype=torch.float64)] if with_sinks else []

    def call(q, k, v, sinks=None):
        o, lse = fmha_varlen(q, k, v, *cu, sinks=sinks, return_lse=True, backend="torch", **options)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (q, k, v, *sinks)])


@everywhere
def test_another_sequence_leaves_no_trace(place):
    """Other keys, values and queries in one sequence: the same bits in all others."""
    q, k, v, *cu = packed(RAGGED, device=place.device)
    before = run(fmha_varlen, q, k, v, *cu, place=place, causal=True)
    part = slice(sum(RAGGED[:2]), sum(RAGGED[:3]))
    for t in (q, k, v):
        t[part] = 5.0
    after = run(fmha_varlen, q, k, v, *cu, place=place, causal=True)
    assert not torch.equal(before[part], after[part])
    before[part] = after[part]
    assert torch.equal(before, after)


@everywhere
def test_nan_behind_does_not_leak_from_queries_and_keys(place):
    q, k, v, *cu = packed(RAGGED, behind=20, device=place.device)
    clean = run(fmha_varlen, q, k, v, *cu, place=place, causal=True, return_lse=True)
    q[sum(RAGGED) :], k[sum(RAGGED) :] = torch.nan, torch.nan
    made = run(fmha_varlen, q, k, v, *cu, place=place, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(made, clean, strict=True))


def test_a_mask_made_once_serves_fmha():
    q, k, v, cu, _ = packed(RAGGED, behind=4)
    made = masks.sequences(cu, length_q=len(q), causal=True)
    by_fmha = fmha(q[None], k[None], v[None], mask=made, layout="BSHD")
    assert torch.equal(by_fmha[0], fmha_varlen(q, k, v, cu, causal=True))


def test_a_callable_gets_places_of_packed_tokens():
    q, k, v, *cu = packed((5, 9), (8, 4), dtype=torch.float32)

    def bias(s, b, h, i, j):
        return s + 0.1 * i - 0.3 * j * h

    options = {"causal": True, "score_mod": bias, "return_lse": True}
    made = fmha_varlen(q, k, v, *cu, **options)
    for a, b in zip(made, contract("fmha_varlen").reference(q, k, v, *cu, **options), strict=True):
        torch.testing.assert_close(a, b)
    plain = fmha_varlen(q, k, v, *cu, causal=True)
    assert not torch.allclose(made[0], plain)
    with pytest.raises(BackendError, match="has no score modifier"):
        fmha_varlen(q, k, v, *cu, **options, backend="triton")
    with pytest.raises(InputError, match="needs a finite number"):
        fmha_varlen(q, k, v, *cu, **options, scale=float("nan"))


def test_a_bias_of_distances_counts_within_a_sequence():
    q, k, v, cu, _ = packed((5, 9), dtype=torch.float32)
    options = {"causal": True, "score_mod": score.relative_bias(torch.randn(4, 9)), "return_lse": True}
    for a, b in zip(
        fmha_varlen(q, k, v, cu, **options), contract("fmha_varlen").reference(q, k, v, cu, **options), strict=True
    ):
        torch.testing.assert_close(a, b)
    with pytest.raises(InputError, match="one cu_seqlens"):
        fmha_varlen(q, k, v, cu, cu, **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_lengths(backend):
    """fullgraph, and other numbers in cu_seqlens compile nothing; other numbers of tokens at most once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, cu):
        return fmha_varlen(q, k, v, cu, causal=True, window=(20, 0), return_lse=True)

    seen = []
    for lengths in (RAGGED, (60, 2, 60, 1), (40, 40, 40, 40), (90, 1, 1, 30)):
        q, k, v, cu, _ = packed(lengths, dtype=torch.float32)
        expected = fmha_varlen(q, k, v, cu, causal=True, window=(20, 0), return_lse=True)
        for a, b in zip(step(q, k, v, cu), expected, strict=True):
            torch.testing.assert_close(a, b)
        seen.append(counter.frame_count)
    assert seen[1] == seen[0]
    assert seen[3] == seen[2] <= seen[0] + 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graph_serves_other_lengths_and_nothing_waits(backend):
    q, k, v, cu, _ = packed(RAGGED, device="cuda")
    fmha_varlen(q, k, v, cu, causal=True, backend=backend)
    try:
        torch.cuda.set_sync_debug_mode("error")
        fmha_varlen(q, k, v, cu, causal=True, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fmha_varlen(q, k, v, cu, causal=True, backend=backend)
    cu.copy_(boundaries((3, 90, 0, 7), "cuda"))
    graph.replay()
    assert torch.equal(captured, fmha_varlen(q, k, v, cu, causal=True, backend=backend))


def test_no_step_asks_for_a_number():
    """On fake tensors, whose numbers are unknown."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v, cu, _ = packed(RAGGED, behind=3)
        o, lse = fmha_varlen(q, k, v, cu, causal=True, return_lse=True)
    assert o.shape == q.shape
    assert lse.shape == (4, len(q))


def test_explain_and_the_raw_call():
    q, k, v, cu, _ = packed(RAGGED)
    said = explain("fmha_varlen", q, k, v, cu, causal=True)
    assert said.bucket == "BH=4,group=2,S_q=128,S_k=128,D=64,D_v=64,mask=3,extras=0,aligned=1,each=16"
    with record() as notes:
        fmha_varlen(q, k, v, cu, causal=True, backend="torch")
    assert notes.calls[0][0].key == "fmha_varlen"
    assert notes.calls[0][1][6:9] == ("seq:0", -1, -1)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_kernels_compile(direction, arch):
    from tests.harness.cases import raw_call
    from tests.harness.fake_driver import target

    subject = contract("fmha_varlen")
    (op,) = [op for op in subject.raw_ops if op.direction == direction]
    call = raw_call(subject, op, "packed", WORKLOADS[0].params, HALF)
    found = implementations(op.op, direction)["triton"]
    with target(arch) as compiled:
        found.launch(call.outputs(), *call.args, config=found.configure(op.bucket_of(call.args, "default"), HALF))
    names = {kernel.name for kernel in compiled}
    assert {"_bounds_kernel", "_table_kernel"} < names


# What the bench measures.


def test_cost_counts_the_pairs_of_each_sequence():
    subject = contract("fmha_varlen")
    for params in ({"causal": True}, {"window": (5, 3)}, {"lengths_k": LONGER, "causal": True}):
        sizes = {"H": 4, "H_kv": 2, "D": 8, "lengths": RAGGED, "behind": 3, **params}
        sample = subject.inputs(sizes, torch.float32, CPU, 0)
        q, k, _ = sample.args
        mask = masks.sequences(
            sample.kwargs["cu_seqlens_q"], sample.kwargs.get("cu_seqlens_k"), length_q=len(q), length_k=len(k),
            causal=bool(params.get("causal")), window=params.get("window"),
        )  # fmt: skip
        there, back = (subject.cost(sample, direction) for direction in ("fwd", "bwd"))
        assert there.flops == 4 * 8 * 4 * int(mask.dense(1, 1, len(q), len(k)).sum())
        assert 2 * back.flops == 5 * there.flops


def test_lengths_of_the_rows():
    assert len(uniform(64, 32768)) == 64
    assert sum(uniform(64, 32768)) == 32768
    assert min(uniform(64, 32768)) >= 1
    assert sum(by_octaves(8192)) == 8192
    assert {sum(w.params["lengths"]) for w in WORKLOADS} == {8192, 32768}


def test_who_competes():
    subject = contract("fmha_varlen")
    assert {peer.name for peer in declared_peers(subject, GPU)} == {"varlen_attn", "flex", "sdpa_loop"}
    assert {peer.name for peer in declared_peers(subject, CPU)} == {"eager"}


def test_the_loop_of_torch_is_the_reference():
    (loop,) = [peer for peer in declared_peers(contract("fmha_varlen"), GPU) if peer.name == "sdpa_loop"]
    subject = contract("fmha_varlen")
    sizes = {"H": 4, "H_kv": 2, "D": 8, "lengths": RAGGED, "causal": True}
    sample = subject.inputs(sizes, torch.float32, CPU, 0)
    torch.testing.assert_close(loop.make(sample)(), subject.reference(*sample.args, **sample.kwargs))
    assert loop.make(subject.inputs({**sizes, "behind": 3}, torch.float32, CPU, 0)) is None
    assert loop.make(subject.inputs({**sizes, "lengths_k": LONGER}, torch.float32, CPU, 0)) is None
    assert loop.make(subject.inputs({**sizes, "window": (3, 0)}, torch.float32, CPU, 0)) is None
