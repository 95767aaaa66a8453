"""mla: the formula over joined tensors, its masks, views and gradients; the same on a CPU and a GPU."""

import pytest
import torch
from tests.ops.attention.bounds import check
from tests.ops.attention.test_gradients import errors
from tests.ops.gemm.bounds import PLACES, VIEWS, run
from torch.nn.attention.flex_attention import create_block_mask

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import contract, explain
from tilewright.errors import InputError
from tilewright.ops.attention.fmha.samples import MASKS
from tilewright.ops.attention.mla.args import joined

HALF = torch.bfloat16
on_every_place = pytest.mark.parametrize("place", PLACES)


def problem(b, h, s_q, s_k, d=128, d_pe=64, d_v=128, *, dtype=HALF, device):
    """Normal q, q_pe, k, k_pe and v, by head."""
    shapes = ((b, h, s_q, d), (b, h, s_q, d_pe), (b, h, s_k, d), (b, 1, s_k, d_pe), (b, h, s_k, d_v))
    return [torch.randn(shape).to(device=device, dtype=dtype) for shape in shapes]


def check_mla(made, tensors, *, layout="BHSD", causal=True, **options):
    """Every element is as near to the attention over joined tensors as its arithmetic allows."""
    if layout == "BSHD":
        tensors = [t.transpose(1, 2) for t in tensors]
        made = made.transpose(1, 2)
    q, q_pe, k, k_pe, v = tensors
    check(made, *joined(q, q_pe, k, k_pe), v, causal=causal, **options)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(128, 64, 128), (64, 32, 64), (80, 24, 48), (16, 64, 32), (192, 64, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_width(causal, widths, dtype, place):
    tensors = problem(1, 3, 150, 150, *widths, dtype=dtype, device=place.device)
    options = {"causal": causal, "return_lse": True}
    check_mla(run(ops.mla, *tensors, place=place, **options), tensors, **options)


@on_every_place
@pytest.mark.parametrize(
    ("s_q", "s_k"), [(1, 1), (1, 130), (64, 64), (65, 127), (128, 129), (40, 200), (200, 40), (3, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(causal, s_q, s_k, place):
    tensors = problem(2, 2, s_q, s_k, device=place.device)
    options = {"causal": causal, "return_lse": True}
    check_mla(run(ops.mla, *tensors, place=place, **options), tensors, **options)


@on_every_place
@pytest.mark.parametrize("name", ["window", *sorted(MASKS)])
@pytest.mark.parametrize("s_q", [150, 70])
def test_every_mask(s_q, name, place):
    tensors = problem(1, 4, s_q, 150, 64, 32, 64, device=place.device)
    mask = masks.window(30, 10) if name == "window" else MASKS[name](150)
    for causal in (False, True):
        options = {"mask": mask, "causal": causal, "return_lse": True}
        check_mla(run(ops.mla, *tensors, place=place, **options), tensors, **options)


@on_every_place
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_every_scale(scale, place):
    tensors = problem(1, 2, 100, 100, 32, 16, 32, device=place.device)
    check_mla(run(ops.mla, *tensors, place=place, scale=scale), tensors, scale=scale)


@on_every_place
def test_it_is_causal_and_scaled_by_both_widths_unless_told(place):
    tensors = problem(1, 2, 70, 70, device=place.device)
    plain = run(ops.mla, *tensors, place=place)
    assert torch.equal(plain, run(ops.mla, *tensors, place=place, causal=True, scale=192**-0.5))


# Layouts.


@on_every_place
@pytest.mark.parametrize("which", ["q", "q_pe", "k", "k_pe", "v", "all"])
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_a_view_gives_what_a_copy_gives(view, which, place):
    tensors = dict(zip(("q", "q_pe", "k", "k_pe", "v"), problem(2, 3, 70, 90, device=place.device), strict=True))
    given = [VIEWS[view](t) if which in (n, "all") else t for n, t in tensors.items()]
    check_mla(run(ops.mla, *given, place=place), list(tensors.values()))


@on_every_place
def test_views_of_two_projections(place):
    """As a model calls it: nothing is copied, and gradients arrive at the projections."""
    b, s, h = 2, 90, 3
    of_q, of_k = (torch.randn(b, s, h, n).to(place.device, HALF).requires_grad_() for n in (192, 256))
    k_pe = torch.randn(b, s, 1, 64).to(place.device, HALF).requires_grad_()
    (q, q_pe), (k, v) = of_q.split((128, 64), -1), of_k.split((128, 128), -1)
    o = run(ops.mla, q, q_pe, k, k_pe, v, place=place, layout="BSHD")
    assert o.shape == (b, s, h, 128)
    assert o.is_contiguous()
    check_mla(o.detach(), [t.detach() for t in (q, q_pe, k, k_pe, v)], layout="BSHD")
    grads = torch.autograd.grad(o, (of_q, of_k, k_pe), torch.randn_like(o))
    assert [g.shape for g in grads] == [of_q.shape, of_k.shape, k_pe.shape]
    assert all(bool(g.any(-1).all()) for g in grads[1:])


@on_every_place
def test_nan_in_a_forbidden_key_does_not_leak(place):
    tensors = problem(1, 2, 150, 150, device=place.device)
    clean = run(ops.mla, *tensors, place=place)
    tensors[3][:, :, 100] = torch.nan
    made = run(ops.mla, *tensors, place=place)
    assert torch.equal(made[:, :, :100], clean[:, :, :100])
    assert bool(made[:, :, 100:].isnan().all())


# Gradients.

CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"mask": masks.window(30)},
    "program": {"mask": "prefix", "causal": False},
    "heads": {"mask": "heads"},
    "scale": {"scale": -0.2},
}


def options_of(name, s_k):
    options = dict(CASES[name])
    if isinstance(options.get("mask"), str):
        options["mask"] = MASKS[options["mask"]](s_k)
    return options


@pytest.mark.parametrize("name", sorted(CASES))
def test_finite_differences(name):
    tensors = problem(1, 4, 5, 6, 3, 2, 2, dtype=torch.float64, device="cpu")

    def call(*tensors):
        o, lse = ops.mla(*tensors, return_lse=True, backend="torch", **options_of(name, 6))
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in tensors])


def formula(q, q_pe, k, k_pe, v, *, causal=True, mask=None, scale=None):
    """(o, lse) in plain differentiable steps."""
    (b, h, s_q, d), s_k = q.shape, k.shape[2]
    scale = (d + q_pe.shape[3]) ** -0.5 if scale is None else scale
    s = scale * (q @ k.mT + q_pe @ k_pe.mT)
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(s_k - s_q)
    if mask is not None:
        seen = seen & mask.dense(b, h, s_q, s_k, q.device)
    s = s.masked_fill(~seen, -1e30)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def gradients(function, tensors, cotangents):
    leaves = [t.detach().requires_grad_() for t in tensors]
    used = [(o, g) for o, g in zip(function(*leaves), cotangents, strict=True) if g is not None]
    return torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("outputs", ["o", "both", "lse"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_formulas_gradients(name, outputs, dtype, place):
    options = options_of(name, 130)
    tensors = problem(2, 4, 100, 130, 64, 32, 64, dtype=dtype, device=place.device)
    do = torch.randn(2, 4, 100, 64).to(place.device, dtype) if outputs != "lse" else None
    dlse = torch.randn(2, 4, 100).to(place.device) if outputs != "o" else None
    wide = [None if g is None else g.double() for g in (do, dlse)]
    wanted = gradients(lambda *t: formula(*t, **options), [t.double() for t in tensors], wide)
    made = gradients(lambda *t: run(ops.mla, *t, place=place, return_lse=True, **options), tensors, (do, dlse))
    whole, tile = (6 * torch.finfo(dtype).eps, 12 * torch.finfo(dtype).eps) if dtype == HALF else (1e-5, 2e-5)
    for tensor, got, exact in zip(tensors, made, wanted, strict=True):
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        if exact is None or not exact.any():
            assert not got.any()
            continue
        found = errors(got, exact)
        assert found[0] <= whole, (name, found)
        assert found[1] <= tile, (name, found)


@on_every_place
def test_rows_that_see_nothing_give_nothing(place):
    tensors = [t.requires_grad_() for t in problem(1, 2, 130, 40, device=place.device)]
    o, lse = run(ops.mla, *tensors, place=place, return_lse=True)
    assert not o[:, :, :90].any()
    assert bool((lse[:, :, :90] == -torch.inf).all())
    dq, dq_pe, *others = torch.autograd.grad(o, tensors, torch.randn_like(o))
    assert not dq[:, :, :90].any()
    assert not dq_pe[:, :, :90].any()
    assert all(bool(g.isfinite().all()) for g in (dq, dq_pe, *others))


@on_every_place
def test_the_shared_gradient_is_summed_in_float32(place):
    """64 heads give the same: any sum in bf16 would stop growing, or round on the way."""
    q, q_pe, k, k_pe, v = problem(1, 1, 40, 40, 32, 16, 32, device=place.device)
    alike = [t.expand(1, 64, -1, -1).contiguous() for t in (q, q_pe, k)]
    tensors = [*alike, k_pe, v.expand(1, 64, -1, -1).contiguous()]
    do = torch.randn_like(v).expand(1, 64, -1, -1).contiguous()
    made = gradients(lambda *t: (run(ops.mla, *t, place=place),), tensors, (do,))[3]
    exact = gradients(lambda *t: formula(*t)[:1], [t.double() for t in tensors], (do.double(),))[3]
    assert errors(made, exact)[0] <= 6 * torch.finfo(HALF).eps
    one = gradients(lambda *t: (run(ops.mla, *t, place=place),), [q, q_pe, k, k_pe, v], (do[:, :1],))[3]
    assert errors(made, 64 * one.double())[0] <= 2 * torch.finfo(HALF).eps


@on_every_place
def test_the_same_call_twice_gives_the_same_bits(place):
    tensors = problem(2, 18, 130, 130, device=place.device)
    do = torch.randn_like(tensors[4])
    first, again = (gradients(lambda *t: (run(ops.mla, *t, place=place),), tensors, (do,)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# What a choice depends on, and what is refused.


def test_explain_names_what_a_choice_depends_on():
    square = problem(2, 4, 90, 90, device="cpu")
    assert explain("mla", *square).bucket == "BH=8,S_q=128,S_k=128,D=128,D_pe=64,D_v=128,mask=1,aligned=1"
    tensors = problem(2, 4, 70, 90, device="cpu")
    assert explain("mla", *tensors).bucket.endswith("mask=2,aligned=1"), "joined operands: only cuDNN, and not this"
    assert explain("mla", *tensors, causal=False).bucket.endswith("mask=0,aligned=1")
    shifted = [*tensors[:3], VIEWS["misaligned"](tensors[3]), tensors[4]]
    assert explain("mla", *shifted, mask=masks.prefix(3)).bucket.endswith("mask=3,aligned=0")


def test_a_mask_that_only_flex_evaluates_is_refused():
    tensors = problem(1, 2, 128, 128, device="cpu")
    foreign = create_block_mask(lambda b, h, i, j: i * 3 >= j * 2, None, None, 128, 128, device="cpu")
    with pytest.raises(InputError, match="no kernel here can evaluate"):
        ops.mla(*tensors, mask=masks.from_block_mask(foreign))


def test_the_raw_op_refuses_what_the_public_one_never_sends():
    checked = contract("mla").check
    wide, narrow = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 6)
    good = [wide, narrow, wide, narrow[:, :1], wide, None, "", -1, -1, 0.5]
    checked(*good)
    turned = torch.ones(1, 2, 6, 4).mT
    for at, value in ((7, -2), (6, "prefix:0"), (5, torch.zeros(3)), (1, turned), (9, float("nan"))):
        args = list(good)
        args[at] = value
        with pytest.raises(InputError):
            checked(*args)
