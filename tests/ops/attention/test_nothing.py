"""Attention over nothing: no queries, no keys, no batch, no heads, there and back, on every backend."""

import pytest
import torch
from tests.ops.gemm.bounds import PLACES, run, unless_refused

from tilewright import mask as masks
from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.attention import score

HALF = torch.bfloat16
on_every_place = pytest.mark.parametrize("place", PLACES)

SIZES = {  # B, H, H_kv, S_q, S_k
    "no batch": (0, 4, 2, 5, 7),
    "no heads of queries": (2, 0, 2, 5, 7),
    "no queries": (2, 4, 2, 0, 7),
    "no keys": (2, 4, 2, 5, 0),
    "no tokens": (2, 4, 2, 0, 0),
    "nothing at all": (0, 0, 1, 0, 0),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": masks.window(2, 1)},
    "program": {"mask": masks.causal() | masks.prefix(2)},
    "softcap": {"softcap": 1.5},
}


def leaves(sizes, d, device):
    b, h, h_kv, s_q, s_k = sizes
    shapes = ((b, h, s_q, d), (b, h_kv, s_k, d), (b, h_kv, s_k, d))
    return [torch.randn(shape).to(device=device, dtype=HALF).requires_grad_() for shape in shapes]


def sees_nothing(o, lse, level=-torch.inf):
    assert not o.any()
    assert bool((lse == level).all())


@on_every_place
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_fmha(sizes, name, with_sinks, place):
    q, k, v = leaves(SIZES[sizes], 64, place.device)
    sinks = torch.full((q.shape[1],), 0.5, device=place.device, requires_grad=True) if with_sinks else None
    o, lse = run(ops.fmha, q, k, v, place=place, sinks=sinks, return_lse=True, **OPTIONS[name])
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
    sees_nothing(o, lse, 0.5 if with_sinks else -torch.inf)
    wanted = [q, k, v] if sinks is None else [q, k, v, sinks]
    cotangents = torch.ones_like(o), torch.ones_like(lse)
    made = unless_refused(torch.autograd.grad, (o, lse), wanted, cotangents, place=place)
    for gradient, of in zip(made, wanted, strict=True):
        assert gradient.shape == of.shape
        if of is not sinks:
            assert not gradient.any()
    if sinks is not None:  # lse is the sink, of each query
        assert bool((made[3] == q.shape[0] * q.shape[2]).all())


@on_every_place
@pytest.mark.parametrize("sizes", SIZES)
def test_mla(sizes, place):
    b, h, _, s_q, s_k = SIZES[sizes]
    if h == 0:
        with pytest.raises(InputError, match="heads"):
            ops.mla(*(torch.zeros(b, n, s, 16) for n, s in ((0, s_q), (0, s_q), (0, s_k), (1, s_k), (0, s_k))))
        return
    q, k, v = leaves((b, h, h, s_q, s_k), 64, place.device)
    q_pe, k_pe, _ = leaves((b, h, 1, s_q, s_k), 16, place.device)
    o, lse = run(ops.mla, q, q_pe, k, k_pe, v, place=place, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
    sees_nothing(o, lse)
    wanted = (q, q_pe, k, k_pe, v)
    for gradient, of in zip(torch.autograd.grad(o, wanted, torch.ones_like(o)), wanted, strict=True):
        assert gradient.shape == of.shape
        assert not gradient.any()


@on_every_place
@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]])
def test_fmha_varlen_without_tokens(cu, with_keys, place):
    cu = torch.tensor(cu, dtype=torch.int32, device=place.device)
    q, k, v = (t[0].transpose(0, 1).detach().requires_grad_() for t in leaves((1, 4, 2, 0, 0), 64, place.device))
    o, lse = run(ops.fmha_varlen, q, k, v, cu, cu if with_keys else None, place=place, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 4, 64), (4, 0))
    for gradient, of in zip(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)), (q, k, v), strict=True):
        assert gradient.shape == of.shape


@on_every_place
@pytest.mark.parametrize(("s_q", "s_k"), [(5, 0), (0, 5), (5, 5)])
@pytest.mark.parametrize("cu", [[0], [0, 0, 0]])
def test_fmha_varlen_without_sequences(cu, s_q, s_k, place):
    """All tokens lie behind the last one."""
    cu = torch.tensor(cu, dtype=torch.int32, device=place.device)
    q, k, v = (t[0].transpose(0, 1).detach().requires_grad_() for t in leaves((1, 4, 2, s_q, s_k), 64, place.device))
    o, lse = run(ops.fmha_varlen, q, k, v, cu, cu, place=place, return_lse=True)
    assert (o.shape, lse.shape) == ((s_q, 4, 64), (4, s_q))
    sees_nothing(o, lse)
    for gradient, of in zip(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)), (q, k, v), strict=True):
        assert gradient.shape == of.shape
        assert not gradient.any()


@on_every_place
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_fmha_fp8(sizes, causal, place):
    q, k, v = (t.detach().to(torch.float8_e4m3fn) for t in leaves(SIZES[sizes], 64, place.device))
    scales = [torch.ones(t.shape[:2], device=place.device) for t in (q, k, v)]
    o, lse = run(ops.fmha_fp8, q, k, v, *scales, place=place, causal=causal, return_lse=True)
    assert (o.shape, o.dtype, lse.shape) == (q.shape, HALF, q.shape[:3])
    sees_nothing(o, lse)


@on_every_place
@pytest.mark.parametrize("states", [1, 2, 3])
@pytest.mark.parametrize("lead", [(0,), (0, 4), (2, 0), (2, 4, 0), (0, 0, 0)])
def test_merge_states(lead, states, place):
    """Rows there are none of; a state that saw nothing has a weight of 0."""
    made = [torch.randn(*lead, 64, device=place.device).to(HALF).requires_grad_() for _ in range(states)]
    logs = [torch.randn(lead, device=place.device).requires_grad_() for _ in range(states)]
    o, lse = run(ops.merge_states, made, logs, place=place)
    assert (o.shape, lse.shape) == ((*lead, 64), lead)
    for gradient, of in zip(torch.autograd.grad(o, (*made, *logs), torch.ones_like(o)), (*made, *logs), strict=True):
        assert gradient.shape == of.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("apart", ["dropout", "bias", "callable"])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_torch_does_apart(sizes, apart, device):
    q, k, v = leaves(SIZES[sizes], 64, device)
    bias = score.relative_bias(torch.zeros(max(q.shape[1], 1), 5, device=device))
    options = {"dropout": 0.5} if apart == "dropout" else {"score_mod": bias}
    if apart == "callable":
        options = {"score_mod": lambda s, b, h, i, j: s * 2}
    o = ops.fmha(q, k, v, **options)
    assert o.shape == q.shape
    assert not o.any()
    for gradient, of in zip(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)), (q, k, v), strict=True):
        assert gradient.shape == of.shape
        assert not gradient.any()


@pytest.mark.parametrize("shape", [(2, 4, 5, 0), (2, 0, 5, 64)])
def test_heads_without_numbers_and_keys_without_heads_are_refused(shape):
    x = torch.zeros(shape)
    with pytest.raises(InputError, match="at least 1|multiple of"):
        ops.fmha(x, x, x)
