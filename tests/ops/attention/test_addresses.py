"""Where tensors begin and how far apart their rows lie: who copies what, and that every backend takes every place."""

import pytest
import torch
from tests.ops.attention.bounds import check
from tests.ops.attention.bounds import problem as drawn
from tests.ops.attention.test_gradients import errors
from tests.ops.gemm.bounds import PLACES, run

from tilewright import mask as masks
from tilewright import ops
from tilewright.ops.attention import reference, score, torch_only, vendor
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.bucket import backward_bucket, forward_bucket, why_not_addressable
from tilewright.ops.attention.fmha import CONTRACT
from tilewright.ops.attention.layout import addressable, dense, loadable
from tilewright.validate.layouts import misaligned, padded_rows

HALF = torch.bfloat16
CAUSAL = (None, None, None, "", -1, 0, 0.125, 0.0)
"""The arguments behind q, k and v under a causal mask."""
on_every_place = pytest.mark.parametrize("place", PLACES)


def gaps(shape, t):
    """What lies around `t`: NaN, of bytes e4m3's."""
    return torch.full(shape, torch.nan if t.is_floating_point() else 0x7F, dtype=t.dtype, device=t.device)


def begun(t, offset):
    """The same values, dense, beginning `offset` bytes behind a multiple of 16."""
    before = offset // t.element_size()
    around = gaps((t.numel() + 16,), t)
    return around[before : before + t.numel()].view(t.shape).copy_(t)


def row_by_row(t):
    """Rows begin two bytes off a multiple of 16, and a whole number of vectors apart."""
    around = gaps((*t.shape[:-1], t.shape[-1] + 8), t)
    return around[..., 1 : t.shape[-1] + 1].copy_(t)


PLACED = {
    "2 bytes": lambda t: begun(t, 2),
    "4 bytes": lambda t: begun(t, 4),
    "8 bytes": lambda t: begun(t, 8),
    "rows of odd length": padded_rows,
    "columns cut off": row_by_row,
}


# ---------------------------------------------------------------------------------------------------- who copies what

DENSE = torch.randn(2, 3, 4, 64).to(HALF)
LYING = {
    "dense": (DENSE, True),
    "by token": (DENSE.transpose(1, 2).contiguous().transpose(1, 2), True),
    "a vector behind": (begun(DENSE, 16), True),
    **{name: (place(DENSE), False) for name, place in PLACED.items()},
    "repeated heads": (DENSE[:, :1].expand(-1, 3, -1, -1), False),
    "transposed": (DENSE.mT.contiguous().mT, False),
    "overlapping rows": (torch.randn(2, 3, 67).to(HALF).unfold(2, 64, 1), False),
    "one head and one token, any strides": (
        torch.randn(400).to(HALF).as_strided((2, 1, 1, 64), (128, 3, 0, 1)),
        True,
    ),
    "rows of one number": (torch.randn(2, 3, 8, 1).to(HALF), False),
}


@pytest.mark.parametrize("name", LYING)
def test_what_vectors_of_16_bytes_can_read(name):
    x, reachable = LYING[name]
    assert addressable(x) == reachable
    made = loadable(x)
    assert torch.equal(made, x)
    assert (made.data_ptr() == x.data_ptr()) == reachable
    if x.shape[3] == 64:
        assert addressable(made)
        assert all(step % 8 == 0 and step for step in made.stride()[:3])
    assert torch.equal(dense(x), x)
    assert dense(x).stride(3) == 1
    assert (dense(x).data_ptr() == x.data_ptr()) == (reachable or name == "rows of one number")


def test_a_row_that_is_no_vector_is_not_copied_in_vain():
    x = torch.randn(2, 3, 4, 20).to(HALF)
    assert not addressable(x)
    assert dense(x) is x


@pytest.mark.parametrize("which", ["q", "k", "v", "do", "o"])
@pytest.mark.parametrize("name", PLACED)
def test_kernels_that_read_through_tensor_maps_refuse_such_tensors_in_words(name, which):
    tensors = {n: torch.randn(1, 2, 16, 64).to(HALF) for n in ("do", "q", "k", "v", "o")}
    tensors[which] = PLACED[name](tensors[which])
    rest = (None, None, None, "", -1, -1, 1.0, 0.0)
    do, q, k, v, o = tensors.values()
    backward = backward_bucket(FmhaBackwardArgs(do, None, q, k, v, o, torch.zeros(1, 2, 16), *rest))
    assert "multiples of 16 bytes" in why_not_addressable(backward)
    forward = why_not_addressable(forward_bucket(FmhaArgs(q, k, v, *rest)))
    assert (forward is None) == (which in ("do", "o"))


@pytest.mark.parametrize("name", ["CUDNN", "FLASH"])
def test_torchs_kernels_get_tensors_that_they_can_load(monkeypatch, name):
    """Whatever the caller has, also a gradient that repeats one number."""
    seen = []

    class Kernels:
        def __getattr__(self, _):
            def called(*args, **kwargs):
                seen.extend(a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4 and a.dtype == HALF)
                return [torch.empty(1, 2, 128, 64)] * 3

            return called

    monkeypatch.setattr(vendor, "_aten", Kernels())
    kernels = getattr(vendor, name)
    for place in (*PLACED.values(), lambda t: t.mT.contiguous().mT):
        q, k, v, o = (place(torch.randn(1, 2, 128, 64).to(HALF)) for _ in range(4))
        do = torch.ones((), dtype=HALF).expand_as(o)
        kernels.forward(FmhaArgs(q, k, v, *CAUSAL))
        kernels.backward(FmhaBackwardArgs(do, None, q, k, v, o, torch.zeros(1, 2, 128), *CAUSAL))
    assert len(seen) >= 6 * (3 + 5)
    for t in seen:
        rows = t if name == "CUDNN" else t.transpose(1, 2)
        assert addressable(rows)


def test_gradients_that_arrive_anywhere_are_copied_before_the_backward():
    o = torch.randn(1, 2, 128, 64).to(HALF)
    saved = (*(torch.randn(1, 2, 128, 64).to(HALF) for _ in range(3)), None, None, None, o, torch.zeros(1, 2, 128))
    args = (*saved[:6], "", -1, -1, 1.0, 0.0)
    for do in (*(place(o) for place in PLACED.values()), o[:, :1].expand_as(o), o.mT.contiguous().mT):
        given = CONTRACT.gradient.raw_args((do, None), saved, args, (True,) * 11).do
        assert addressable(given)
        assert torch.equal(given, do)


# --------------------------------------------------------------------------------------------- every backend takes it


def formula(q, k, v, causal):
    """(o, do -> gradients) in float64."""
    leaves = [t.double().detach().requires_grad_() for t in (q, k, v)]
    o, _ = torch_only.plain(*leaves, masks.causal() if causal else None, None, score.split("fmha", None, None, None))
    return o, leaves


def compare(made, wanted):
    for got, exact in zip(made, wanted, strict=True):
        if not exact.any():  # of one key the probability is 1
            assert got.abs().max() < 1e-3
            continue
        whole, tile = errors(got, exact)
        assert whole <= 6 * torch.finfo(HALF).eps
        assert tile <= 12 * torch.finfo(HALF).eps


@on_every_place
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [70, 700])
def test_every_backend_at_every_place(s, causal, name, place):
    """Short ones and those that torch gives to cuDNN or FLASH; what a backend refuses, the next one takes."""
    q, k, v = (PLACED[name](t) for t in drawn(1, 4, 2, s, s, 64, dtype=HALF, device=place.device))
    check(run(ops.fmha, q, k, v, place=place, causal=causal), q, k, v, causal=causal)


@on_every_place
@pytest.mark.parametrize("arriving", [*PLACED, "expanded", "transposed"])
@pytest.mark.parametrize("name", ["dense", "2 bytes"])
def test_gradients_at_every_place(name, arriving, place):
    s = 700
    q, k, v = drawn(1, 4, 2, s, s, 64, dtype=HALF, device=place.device)
    given = [PLACED[name](t) if name in PLACED else t for t in (q, k, v)]
    do = torch.randn(1, 4, s, 64, device=place.device).to(HALF)
    if arriving == "expanded":
        do = do[:, :, :, :1].expand(-1, -1, -1, 64)
    else:
        do = do.mT.contiguous().mT if arriving == "transposed" else PLACED[arriving](do)
    leaves = [t.detach().requires_grad_() for t in given]
    made = torch.autograd.grad(run(ops.fmha, *leaves, place=place, causal=True), leaves, do)
    o, exact = formula(q, k, v, True)
    compare(made, torch.autograd.grad(o, exact, do.double()))


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])


@on_each_device
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("d", [64, pytest.param(96, marks=pytest.mark.exhaustive), 128])
@pytest.mark.parametrize("s", [1, 130, 1030])
def test_whatever_is_chosen_takes_it(s, d, name, device):
    """As `auto` does it, forward and backward, also of torch's own wish."""
    q, k, v = drawn(2, 4, 4, s, s, d, dtype=HALF, device=device)
    do = torch.randn(2, 4, s, d, device=device).to(HALF)
    o, exact = formula(q, k, v, True)
    wanted = torch.autograd.grad(o, exact, do.double())
    for backend in (None, "torch"):
        leaves = [PLACED[name](t).requires_grad_() for t in (q, k, v)]
        made = ops.fmha(*leaves, causal=True, backend=backend)
        compare(torch.autograd.grad(made, leaves, PLACED[name](do)), wanted)


@on_each_device
@pytest.mark.parametrize("name", PLACED)
def test_other_ops_take_it(name, device):
    """Packed sequences, latent attention, float8, merged states."""
    put, device = PLACED[name], torch.device(device)
    q, k, v = drawn(1, 4, 4, 700, 700, 64, dtype=HALF, device=device)
    do = torch.randn_like(q)
    o, exact = formula(q, k, v, True)
    wanted = torch.autograd.grad(o, exact, do.double())

    leaves = [put(t[0].transpose(0, 1).contiguous()).requires_grad_() for t in (q, k, v)]
    cu = torch.tensor([7, 0, 700], dtype=torch.int32, device=device)[1:]
    made = ops.fmha_varlen(*leaves, cu, causal=True)
    grads = torch.autograd.grad(made, leaves, put(do[0].transpose(0, 1).contiguous()))
    compare([g.transpose(0, 1)[None] for g in grads], wanted)

    rotated = [torch.zeros(1, heads, 700, 32, dtype=HALF, device=device) for heads in (4, 1)]
    parts = [put(t).requires_grad_() for t in (q, rotated[0], k, rotated[1], v)]
    made = ops.mla(*parts, causal=True, scale=0.125)
    dq, _, dk, _, dv = torch.autograd.grad(made, parts, put(do))
    compare((dq, dk, dv), wanted)

    coarse = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
    given = [put(t.view(torch.uint8)).view(t.dtype) for t in coarse]
    ones = torch.ones(1, 4, device=device)
    made, plain = (ops.fmha_fp8(*tensors, ones, ones, ones, causal=True) for tensors in (given, coarse))
    assert (made.double() - plain.double()).norm() <= 0.02 * plain.double().norm()  # not the same kernel

    lse = torch.randn(1, 4, 700, device=device)
    states = [put(t).requires_grad_() for t in (q, k)]
    merged, _ = ops.merge_states(states, [begun(lse, 4), lse + 1])
    share = torch.sigmoid(torch.tensor(-1.0, device=device))
    joined = share.double() * q.double() + (1 - share.double()) * k.double()
    assert (merged.double() - joined).norm() <= 2 * torch.finfo(HALF).eps * joined.norm()
    first, second = torch.autograd.grad(merged, states, put(do))
    torch.testing.assert_close(first + second, do, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo reads it
@pytest.mark.parametrize("name", PLACED)
def test_what_torch_does_apart_takes_it(name):
    """Dropout is torch's scaled_dot_product_attention, other modifiers are FlexAttention."""
    q, k, v = drawn(1, 4, 4, 256, 256, 64, dtype=HALF, device="cuda")
    do = torch.randn_like(q)
    for options in ({"dropout": 1e-6}, {"score_mod": score.relative_bias(torch.zeros(4, 9, device="cuda"))}):
        leaves = [PLACED[name](t).detach().requires_grad_() for t in (q, k, v)]
        made = ops.fmha(*leaves, **options)
        o, exact = formula(q, k, v, False)
        compare(torch.autograd.grad(made, leaves, PLACED[name](do)), torch.autograd.grad(o, exact, do.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [vendor.CUDNN, vendor.FLASH], ids=["cudnn", "flash"])
@pytest.mark.parametrize("name", PLACED)
def test_torchs_kernels_themselves(name, kernels):
    q, k, v = drawn(1, 4, 4, 512, 512, 64, dtype=HALF, device="cuda")
    do = torch.randn_like(q)
    given = [PLACED[name](t) for t in (q, k, v)]
    o, lse = kernels.forward(FmhaArgs(*given, *CAUSAL))
    check(o, q, k, v, causal=True)
    exact_o, leaves = formula(q, k, v, True)
    made = kernels.backward(FmhaBackwardArgs(PLACED[name](do), None, *given, PLACED[name](o), lse, *CAUSAL))
    compare(made, torch.autograd.grad(exact_o, leaves, do.double()))


def test_the_reference_hands_such_tensors_on(monkeypatch):
    """Large enough problems go to torch's kernels wherever they lie."""
    monkeypatch.setattr(vendor, "kernels", lambda _: vendor.FLASH)
    seen = []
    monkeypatch.setattr(vendor, "loadable", lambda t: seen.append(t) or t)
    q = misaligned(torch.randn(1, 2, 16, 64).to(HALF))
    with pytest.raises((RuntimeError, NotImplementedError)):  # there is no such kernel on a CPU
        reference.attention(FmhaArgs(q, q, q, *CAUSAL))
    assert len(seen) == 3
