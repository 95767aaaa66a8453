"""Gradients of fmha: against finite differences, against autograd of the formula in float64, and what has none."""

import pytest
import torch
from tests.ops.attention.bounds import problem
from tests.ops.gemm.bounds import PLACES, run

from tilewright import mask as masks
from tilewright import ops
from tilewright.errors import InputError, RefusedError
from tilewright.ops.attention import score
from tilewright.ops.attention.fmha.samples import MASKS

HALF = torch.bfloat16
on_every_place = pytest.mark.parametrize("place", PLACES)
CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": masks.window(30)},
    "ahead": {"mask": masks.window(10, 20)},
    "program": {"mask": "prefix"},
    "heads": {"mask": "heads"},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {},
    "scale": {"scale": -0.4},
}


def options_of(name, s_k, device):
    """The case for so many keys."""
    options = dict(CASES[name])
    if isinstance(options.get("mask"), str):
        options["mask"] = MASKS[options["mask"]](s_k)
    if name == "alibi":
        options["score_mod"] = (score.softcap(2.0), score.alibi(score.alibi_slopes(4, device)))
    return options


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", sorted(CASES))
def test_finite_differences(name, with_sinks):
    """The reference's backward is written out, not derived: torch's own check of it, o and lse, in float64."""
    s_k = 5 if name in ("window", "full") else 8
    tensors = problem(1, 4, 2, 6, s_k, 3, 2, dtype=torch.float64, device="cpu")
    options = options_of(name, s_k, "cpu")
    if with_sinks:
        tensors.append(torch.randn(4, dtype=torch.float64))

    def call(q, k, v, sinks=None):
        o, lse = ops.fmha(q, k, v, sinks=sinks, return_lse=True, backend="torch", **options)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in tensors])


def formula(q, k, v, sinks=None, *, mask=None, causal=False, scale=None, score_mod=None, softcap=None, **ignored):
    """(o, lse) in plain differentiable steps."""
    heads, s_q, s_k = q.shape[1], q.shape[2], k.shape[2]
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    scores = score.split("formula", score_mod, softcap, None)
    s = (q.shape[3] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    distance = torch.arange(s_q, device=q.device)[:, None] + (s_k - s_q) - torch.arange(s_k, device=q.device)
    if scores.slopes is not None:
        s = s - scores.slopes.to(q)[:, None, None] * distance.abs()
    if causal:
        s = s.masked_fill(distance < 0, -1e30)
    if mask is not None:
        s = s.masked_fill(~mask.dense(q.shape[0], heads, s_q, s_k, q.device), -1e30)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)
    p = torch.softmax(s, -1)[..., :s_k]
    return p @ v, torch.logsumexp(s, -1)


def errors(made, wanted):
    """Relative to its norm, the worst 64 x 64 tile too, of what a tile's usual norm is."""
    difference, tiles = (made.double() - wanted), []
    for rows in range(0, wanted.shape[-2], 64):
        part = (..., slice(rows, rows + 64), slice(None))
        usual = float(wanted.norm()) * (difference[part].numel() / difference.numel()) ** 0.5
        tiles.append(float(difference[part].norm()) / usual)
    return float(difference.norm()) / float(wanted.norm()), max(tiles)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("outputs", ["o", "both", "lse"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_formulas_gradients(name, outputs, dtype, place):
    options = options_of(name, 130, place.device)
    tensors = problem(2, 4, 2, 100, 130, 64, dtype=dtype, device=place.device)
    tensors.append(torch.randn(4, device=place.device))
    do = torch.randn(2, 4, 100, 64, device=place.device).to(dtype) if outputs != "lse" else None
    dlse = torch.randn(2, 4, 100, device=place.device) if outputs != "o" else None

    def grads(function, leaves, cotangents):
        leaves = [t.detach().requires_grad_() for t in leaves]
        made = function(leaves)
        used = [(o, g) for o, g in zip(made, cotangents, strict=True) if g is not None]
        return torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True)

    def ours(leaves):
        q, k, v, sinks = leaves
        return run(ops.fmha, q, k, v, place=place, sinks=sinks, return_lse=True, **options)

    wide = [None if g is None else g.double() for g in (do, dlse)]
    wanted = grads(lambda leaves: formula(*leaves, **options), [t.double() for t in tensors], wide)
    try:
        made = grads(ours, tensors, (do, dlse))
    except RefusedError as error:  # the backward takes less than the forward
        assert place.device == "cuda"
        pytest.skip(str(error))
    whole, tile = (6 * torch.finfo(dtype).eps, 12 * torch.finfo(dtype).eps) if dtype == HALF else (1e-5, 2e-5)
    for tensor, got, exact in zip(tensors, made, wanted, strict=True):
        assert got.dtype == tensor.dtype
        if exact is None or not exact.any():
            assert not got.any()
            continue
        if got.dim() == 1:
            torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.02 * float(exact.norm()))
            continue
        found = errors(got, exact)
        assert found[0] <= whole, (name, found)
        assert found[1] <= tile, (name, found)


@on_every_place
def test_rows_that_see_nothing_give_nothing(place):
    q, k, v = (t.requires_grad_() for t in problem(1, 2, 1, 130, 40, 64, dtype=HALF, device=place.device))
    o = run(ops.fmha, q, k, v, place=place, causal=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    assert not dq[:, :, :90].any()
    assert all(bool(g.isfinite().all()) for g in (dq, dk, dv))
    head = torch.randn_like(o)
    head[:, :, 90:] = 0
    assert not any(g.any() for g in torch.autograd.grad(run(ops.fmha, q, k, v, place=place, causal=True), (k, v), head))


@on_every_place
@pytest.mark.parametrize("form", ["sum", "transposed", "float32"])
def test_cotangents_as_autograd_makes_them(form, place):
    q, k, v = (t.requires_grad_() for t in problem(2, 4, 2, 70, 70, 64, dtype=HALF, device=place.device))
    o = run(ops.fmha, q, k, v, place=place, causal=True)
    plain = torch.randn_like(o)
    given = {
        "sum": torch.ones((), device=place.device, dtype=HALF).expand_as(o),
        "transposed": plain.mT.contiguous().mT,
        "float32": plain,
    }[form]
    if form == "float32":
        made = torch.autograd.grad(o.float(), (q, k, v), given.float())
    else:
        made = torch.autograd.grad(o, (q, k, v), given)
    again = run(ops.fmha, q, k, v, place=place, causal=True)
    for a, b in zip(made, torch.autograd.grad(again, (q, k, v), given.contiguous()), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)  # torch's products depend on strides


@on_every_place
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_each_alone(wanted, place):
    tensors = dict(zip("qkv", problem(1, 2, 1, 70, 70, 64, dtype=HALF, device=place.device), strict=True))
    everything = [t.clone().requires_grad_() for t in tensors.values()]
    do = torch.randn_like(tensors["q"])
    whole = torch.autograd.grad(run(ops.fmha, *everything, place=place, causal=True), everything, do)
    given = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
    o = run(ops.fmha, *given.values(), place=place, causal=True)
    part = torch.autograd.grad(o, [given[n] for n in wanted], do)
    for n, g in zip(wanted, part, strict=True):
        assert torch.equal(g, whole["qkv".index(n)])


@on_every_place
def test_gradients_lie_as_their_tensors(place):
    tokens = [t.transpose(1, 2).contiguous() for t in problem(2, 4, 2, 70, 70, 64, dtype=HALF, device=place.device)]
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in tokens)
    o = run(ops.fmha, q, k, v, place=place)
    for g in torch.autograd.grad(o, (q, k, v), torch.randn_like(o)):
        assert g.transpose(1, 2).is_contiguous()


def test_slopes_have_none():
    q = torch.randn(1, 2, 4, 8)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(InputError, match="slopes of alibi require a gradient"):
        ops.fmha(q, q, q, score_mod=score.alibi(slopes))


def test_narrow_sinks_get_theirs_in_their_dtype():
    q = torch.randn(1, 2, 4, 8)
    sinks = torch.randn(2).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(ops.fmha(q, q, q, sinks=sinks).sum(), sinks)
    assert grad.dtype == torch.bfloat16
    assert bool(grad.any())
