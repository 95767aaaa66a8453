"""fmha: the formula with every mask and modifier, views, masked rows, special values; the same on a CPU and a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.bounds import check, exact, faults, problem
from tests.ops.gemm.bounds import PLACES, VIEWS, run

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import contract, explain, record
from tilewright.errors import InputError, RefusedError
from tilewright.ops.attention import reference, score, vendor
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.fmha.samples import MASKS

HALF = torch.bfloat16
on_every_place = pytest.mark.parametrize("place", PLACES)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (40, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_width(causal, d, d_v, dtype, place):
    q, k, v = problem(1, 4, 2, 150, 150, d, d_v, dtype=dtype, device=place.device)
    options = {"causal": causal, "return_lse": True}
    check(run(ops.fmha, q, k, v, place=place, **options), q, k, v, **options)


@on_every_place
@pytest.mark.parametrize(
    ("s_q", "s_k"), [(1, 1), (1, 130), (64, 64), (65, 127), (128, 129), (40, 200), (200, 40), (3, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(causal, s_q, s_k, place):
    q, k, v = problem(2, 4, 1, s_q, s_k, 64, dtype=HALF, device=place.device)
    options = {"causal": causal, "return_lse": True}
    check(run(ops.fmha, q, k, v, place=place, **options), q, k, v, **options)


@on_every_place
@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 5), (2, 4, 2, 0, 5), (2, 4, 2, 0, 0)])
def test_nothing(shape, place):
    b, h, h_kv, s_q, s_k = shape
    q, k, v = problem(b, h, h_kv, s_q, s_k, 32, dtype=HALF, device=place.device)
    o, lse = run(ops.fmha, q, k, v, place=place, return_lse=True)
    assert o.shape == (b, h, s_q, 32)
    assert lse.shape == (b, h, s_q)


BANDS = {
    "window": masks.window(30),
    "wide": masks.window(500),
    "self": masks.window(0, 0),
    "both": masks.window(20, 70),
    "ahead": masks.window(None, 45),
    "behind": masks.window(45, None),
}


@on_every_place
@pytest.mark.parametrize("name", sorted(BANDS))
@pytest.mark.parametrize("s_q", [150, 70])
def test_every_band(s_q, name, place):
    q, k, v = problem(1, 2, 2, s_q, 150, 64, dtype=HALF, device=place.device)
    options = {"mask": BANDS[name], "return_lse": True}
    check(run(ops.fmha, q, k, v, place=place, **options), q, k, v, **options)


@on_every_place
@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("s_q", [150, 70])
def test_every_program(s_q, name, place):
    q, k, v = problem(2, 4, 2, s_q, 150, 64, dtype=HALF, device=place.device)
    options = {"mask": MASKS[name](150), "return_lse": True}
    check(run(ops.fmha, q, k, v, place=place, **options), q, k, v, **options)


@on_every_place
def test_masks_of_each_sequence(place):
    q, k, v = problem(2, 2, 2, 130, 130, 64, dtype=HALF, device=place.device)
    ids = torch.tensor([[40, 90, 0], [1, 64, 65]])
    ids = torch.stack([torch.repeat_interleave(torch.arange(3), n) for n in ids]).int()
    for mask in (masks.document(ids) & masks.causal(), masks.causal() | masks.prefix(torch.tensor([7, 100]))):
        check(run(ops.fmha, q, k, v, place=place, mask=mask), q, k, v, mask=mask)


@on_every_place
def test_documents_are_attentions_of_their_own(place):
    q, k, v = problem(1, 4, 2, 200, 200, 64, dtype=HALF, device=place.device)
    cu = torch.tensor([0, 1, 77, 141, 200], dtype=torch.int32)
    packed = run(ops.fmha, q, k, v, place=place, mask=masks.document(cu_seqlens=cu), causal=True)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = [t[:, :, start:end] for t in (q, k, v)]
        check(packed[:, :, start:end], *alone, causal=True)


@on_every_place
@pytest.mark.parametrize("mask", [None, masks.window(40), MASKS["dilated"](133)], ids=["causal", "window", "program"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_every_modifier(with_sinks, with_alibi, softcap, mask, place):
    q, k, v = problem(1, 6, 2, 133, 133, 64, dtype=HALF, device=place.device, spread=2.0)
    options = {"mask": mask, "causal": mask is None, "softcap": softcap, "return_lse": True, "scale": 0.2}
    if with_alibi:
        options["score_mod"] = score.alibi(score.alibi_slopes(6, place.device))
    if with_sinks:
        options["sinks"] = 3 * torch.randn(6, device=place.device)
    check(run(ops.fmha, q, k, v, place=place, **options), q, k, v, **options)


@on_every_place
@pytest.mark.parametrize("scale", [0.0, -0.3, 5.0])
def test_every_scale(scale, place):
    q, k, v = problem(1, 2, 1, 100, 100, 64, dtype=HALF, device=place.device)
    check(run(ops.fmha, q, k, v, place=place, scale=scale, causal=True), q, k, v, scale=scale, causal=True)


@on_every_place
def test_large_scores_do_not_overflow(place):
    q, k, v = problem(1, 2, 2, 130, 130, 64, dtype=HALF, device=place.device, spread=30.0)
    options = {"causal": True, "return_lse": True, "sinks": torch.tensor([900.0, -900.0], device=place.device)}
    o, lse = run(ops.fmha, q, k, v, place=place, **options)
    assert bool(o.isfinite().all() & lse.isfinite().all())
    wanted, wanted_lse, *_ = exact(q, k, v, **options)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(o.double(), wanted, rtol=0.02, atol=0.5)


# Layouts.


@on_every_place
@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_a_view_gives_what_a_copy_gives(view, which, place):
    tensors = dict(zip("qkv", problem(2, 4, 2, 70, 90, 64, dtype=HALF, device=place.device), strict=True))
    given = {n: VIEWS[view](t) if which in (n, "all") else t for n, t in tensors.items()}
    check(run(ops.fmha, *given.values(), place=place, causal=True), *tensors.values(), causal=True)


@on_every_place
def test_by_token_in_memory(place):
    q, k, v = problem(2, 4, 2, 70, 70, 64, dtype=HALF, device=place.device)
    tokens = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    as_view = run(ops.fmha, *(t.transpose(1, 2) for t in tokens), place=place, causal=True)
    assert as_view.transpose(1, 2).is_contiguous()
    as_layout = run(ops.fmha, *tokens, place=place, causal=True, layout="BSHD")
    assert as_layout.is_contiguous()
    assert torch.equal(as_layout.transpose(1, 2), as_view)
    check(as_view, q, k, v, causal=True)
    assert run(ops.fmha, q, k, v, place=place, causal=True).is_contiguous()


@on_every_place
def test_expanded_keys(place):
    q, k, v = problem(3, 4, 2, 70, 70, 64, dtype=HALF, device=place.device)
    k, v = k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)
    check(run(ops.fmha, q, k, v, place=place), q, k, v)


# What a query may not see does not reach it.


@on_every_place
@pytest.mark.parametrize("name", ["causal", "window", *sorted(MASKS)])
def test_a_forbidden_key_leaves_no_trace(name, place):
    """Another key and value: the same bits for every query that may not see it."""
    s = 150
    made = {"causal": lambda s: masks.causal(), "window": lambda s: masks.window(30), **MASKS}
    mask = made[name](s)
    q, k, v = problem(1, 4, 2, s, s, 64, dtype=HALF, device=place.device)
    before = run(ops.fmha, q, k, v, place=place, mask=mask)
    seen = mask.dense(1, 4, s, s, place.device)[0]
    changed = 0
    for j in (0, s // 2, s - 1):
        blind = ~seen[:, :, j]  # (H, S) queries that do not see key j
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, j], other_v[:, :, j] = 3.0, -7.0
        after = run(ops.fmha, q, other_k, other_v, place=place, mask=mask)
        assert torch.equal(before[0][blind], after[0][blind])
        changed += int((before[0][~blind] != after[0][~blind]).any())
    assert changed, "the keys that were changed are seen by somebody"


@on_every_place
def test_nan_in_a_forbidden_key_does_not_leak(place):
    q, k, v = problem(1, 2, 2, 150, 150, 64, dtype=HALF, device=place.device)
    clean = run(ops.fmha, q, k, v, place=place, causal=True)
    k[:, :, 100] = torch.nan
    made = run(ops.fmha, q, k, v, place=place, causal=True)
    assert torch.equal(made[:, :, :100], clean[:, :, :100])
    assert bool(made[:, :, 100:].isnan().all())


@on_every_place
def test_what_lies_around_in_memory_does_not_leak(place):
    """NaN between the rows, before the first and after the last: tiles are loaded whole."""
    b, h, h_kv, s, d = 2, 4, 2, 70, 40
    tensors = problem(b, h, h_kv, s, s, d, dtype=HALF, device=place.device)
    wide = []
    for t in tensors:
        room = torch.full((b, t.shape[1], s + 60, 64), torch.nan, dtype=HALF, device=place.device)
        room[:, :, 30 : 30 + s, 8 : 8 + d] = t
        wide.append(room[:, :, 30 : 30 + s, 8 : 8 + d])
    check(run(ops.fmha, *wide, place=place, causal=True), *tensors, causal=True)


@on_every_place
def test_rows_that_see_nothing_are_zero(place):
    q, k, v = problem(1, 2, 2, 150, 40, 64, dtype=HALF, device=place.device)
    o, lse = run(ops.fmha, q, k, v, place=place, causal=True, return_lse=True)
    assert not o[:, :, :110].any()
    assert bool((lse[:, :, :110] == -torch.inf).all())
    assert bool(lse[:, :, 110:].isfinite().all())
    sinks = torch.tensor([0.5, -2.0], device=place.device)
    o, lse = run(ops.fmha, q, k, v, place=place, causal=True, return_lse=True, sinks=sinks)
    assert not o[:, :, :110].any()
    torch.testing.assert_close(lse[:, :, :110], sinks[:, None].expand(1, 2, 110))
    nothing = run(ops.fmha, q, k, v, place=place, mask=masks.causal() & ~masks.causal(), return_lse=True)
    assert not nothing[0].any()
    assert bool((nothing[1] == -torch.inf).all())


@on_every_place
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_size_mask_and_modifier(place, data):
    length = st.one_of(st.integers(1, 20), st.sampled_from([31, 63, 64, 65, 127, 128, 129, 200]))
    s_q, s_k, group = data.draw(length), data.draw(length), data.draw(st.integers(1, 4))
    d = data.draw(st.sampled_from([8, 16, 64, 72, 128]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    q, k, v = problem(data.draw(st.integers(1, 2)), 2 * group, 2, s_q, s_k, d, dtype=dtype, device=place.device)
    side = st.one_of(st.none(), st.integers(0, 150))
    leaf = st.one_of(
        st.builds(masks.window, side, side),
        st.builds(masks.prefix, st.integers(0, 150)),
        st.builds(masks.dilated, st.integers(1, 9)),
        st.builds(masks.strided, st.integers(1, 9)),
        st.builds(masks.global_tokens, st.integers(0, 9)),
    )
    options = {"return_lse": True, "causal": data.draw(st.booleans())}
    drawn = data.draw(st.lists(leaf, max_size=2))
    if drawn:
        both = drawn[0] & drawn[-1] if data.draw(st.booleans()) else drawn[0] | drawn[-1]
        options["mask"] = ~both if data.draw(st.booleans()) else both
    if data.draw(st.booleans()):
        options["sinks"] = torch.randn(2 * group, device=place.device)
    if data.draw(st.booleans()):
        options["softcap"] = 2.0
    try:
        made = ops.fmha(q, k, v, **options, backend=place.backend)
    except RefusedError:
        if place.backend == "torch":  # a kernel may say no in words, the reference may not
            raise
        return
    check(made, q, k, v, **options)


# The bounds, the blocks, and what a choice depends on.


@pytest.mark.parametrize("fault", ["lost tile of keys", "key too far", "missing rescale", "one element"])
def test_the_bounds_find_a_wrong_tile(fault):
    """One 64 x 64 tile of 4 heads is wrong."""
    q, k, v = problem(1, 4, 4, 256, 256, 128, dtype=HALF, device="cpu")
    wanted, _, off, _ = exact(q, k, v, causal=True)
    assert faults(wanted.to(HALF), wanted, off) == []
    made = wanted.to(HALF)
    rows, columns = slice(128, 192), slice(64, 128)
    if fault == "lost tile of keys":
        other = exact(q, k[:, :, 64:], v[:, :, 64:], causal=True)[0]
    elif fault == "key too far":
        other = exact(q, k, v, mask=masks.window(None, 1))[0]
    elif fault == "missing rescale":
        other = 1.05 * wanted
    else:
        other = wanted.clone()
        other[0, 2, 150, 70] += 0.02
    made[0, 2, rows, columns] = other[0, 2, rows, columns].to(HALF)
    assert faults(made, wanted, off) == [(2, 2, 1)]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(9, 3), MASKS["heads"](61)], ids=str)
def test_the_reference_in_blocks_is_the_reference(mask, monkeypatch):
    q, k, v = problem(2, 4, 2, 70, 61, 16, dtype=torch.float64, device="cpu")
    sinks = torch.randn(4, dtype=torch.float64)

    def both():
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
        o, lse = ops.fmha(*leaves[:3], mask=mask, sinks=leaves[3], softcap=2.0, return_lse=True, backend="torch")
        return o, lse, *torch.autograd.grad((o.sum() + lse.sum()), leaves)

    whole = both()
    monkeypatch.setattr(reference, "_BLOCK", 2 * 4 * 61 * 9)
    for a, b in zip(whole, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_explain_names_what_a_choice_depends_on():
    q, k, v = problem(2, 4, 2, 90, 90, 64, 32, dtype=HALF, device="cpu")
    said = explain("fmha", q, k, v, causal=True)
    assert said.bucket == "BH=8,group=2,S_q=128,S_k=128,D=64,D_v=32,mask=1,extras=0,aligned=1"
    for options, mask, extras in (
        ({}, 0, 0),
        ({"mask": masks.window(5)}, 2, 0),
        ({"mask": masks.causal() & masks.window(None)}, 1, 0),
        ({"mask": masks.document(torch.zeros(90, dtype=torch.int32)), "causal": True}, 3, 0),
        ({"softcap": 2.0, "sinks": torch.ones(4)}, 0, 5),
        ({"score_mod": score.alibi(torch.ones(4))}, 0, 2),
    ):
        assert explain("fmha", q, k, v, **options).bucket.endswith(f"mask={mask},extras={extras},aligned=1"), options
    assert "S_k=0," in explain("fmha", q, k[:, :, :0], v[:, :, :0]).bucket


def test_a_fast_kernel_gets_a_band_as_two_numbers():
    """What arrives at the raw op: no program and no data where one interval says everything."""
    q, k, v = problem(1, 2, 2, 5, 5, 16, dtype=HALF, device="cpu")
    for options, wanted in (
        ({}, ("", -1, -1)),
        ({"causal": True}, ("", -1, 0)),
        ({"mask": masks.window(3), "causal": True}, ("", 3, 0)),
        ({"mask": masks.window(3, 2)}, ("", 3, 2)),
    ):
        with record() as notes:
            ops.fmha(q, k, v, **options, backend="torch")
        args = notes.calls[0][1]
        assert args[6:9] == wanted
        assert args[5] is None
    with record() as notes:
        ops.fmha(q, k, v, mask=masks.prefix(2), causal=True, backend="torch")
    program, left, right = notes.calls[0][1][6:9]
    assert (left, right) == (-1, -1)
    assert program
    assert notes.calls[0][1][5].dtype == torch.int32


def test_compiled_it_is_one_node():
    q, k, v = problem(1, 4, 2, 33, 33, 16, dtype=HALF, device="cpu")
    graphs = []

    def keep(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    compiled = torch.compile(lambda *t: ops.fmha(*t, causal=True, softcap=3.0), fullgraph=True, backend=keep)
    assert torch.equal(compiled(q, k, v), ops.fmha(q, k, v, causal=True, softcap=3.0))
    assert [sum("tilewright.fmha" in t for t in graph) for graph in graphs] == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("left_right", [(-1, -1), (-1, 0), (300, 0), (100, 50)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_cudnn_and_flash_compute_is_the_reference(with_sinks, left_right):
    """Large problems of the torch backend on a GPU go to them."""
    left, right = left_right
    q, k, v = problem(2, 4, 2, 1024, 1024, 128, dtype=HALF, device="cuda")
    args = FmhaArgs(q, k, v, None, None, None, "", left, right, 0.1, 0.0)
    assert vendor.kernels(args) is (vendor.CUDNN if left < 0 and right <= 0 else vendor.FLASH)
    options = {"mask": masks.window(None if left < 0 else left, None if right < 0 else right), "return_lse": True}
    if with_sinks:
        options["sinks"] = torch.randn(4, device="cuda")
    check(ops.fmha(q, k, v, backend="torch", **options), q, k, v, **options)


def test_the_raw_op_refuses_what_the_public_one_never_sends():
    q = torch.ones(1, 2, 4, 8)
    checked = contract("fmha").check
    for change in ({7: -2}, {6: "prefix:0"}, {10: -1.0}, {5: torch.zeros(3)}):
        args = [q, q, q, None, None, None, "", -1, -1, 0.5, 0.0]
        for at, value in change.items():
            args[at] = value
        with pytest.raises(InputError):
            checked(*args)
