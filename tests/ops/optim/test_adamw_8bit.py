"""adamw_8bit: the dynamic map, the nearest codes, and steps that are adamw's up to the rounding of their averages."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops import adamw, adamw_8bit
from tilewright.ops.optim.dynamic_map import BLOCK, dequantise, numbers, quantise

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


def map_of_the_paper(signed):
    """The numbers of Dettmers et al.: middles of the cells of seven decades, 0 and 1, in float64."""
    values = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        middles = (10.0 ** (i - 6) * (ends[:-1] + ends[1:]) / 2).tolist()
        values += middles + [-x for x in middles if signed]
    return torch.tensor(sorted(values), dtype=torch.float64)


def values(n, signed=True, seed=0):
    """Of magnitudes over many decades."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * torch.exp(4 * torch.randn(n, generator=g))
    return x if signed else x.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_and_nearest_codes(signed):
    exact = map_of_the_paper(signed)
    assert len(exact) == 256
    torch.testing.assert_close(numbers(signed).double(), exact, rtol=2e-7, atol=0)
    x = values(64 * BLOCK, signed)
    codes, scales = quantise(x, signed)
    assert torch.equal(scales, x.view(-1, BLOCK).abs().amax(1))
    shares = (x.view(-1, BLOCK) / scales[:, None]).double()
    assert torch.equal(codes.view(-1, BLOCK).long(), torch.bucketize(shares, (exact[1:] + exact[:-1]) / 2))
    every = torch.arange(256).to(torch.uint8)
    assert torch.equal(quantise(dequantise(every, torch.ones(1), signed), signed)[0], every)


def problem(n=1000, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    param, grad = (torch.randn(n, generator=g).to(dtype) for _ in range(2))
    m = values(n)
    return param, grad, (*quantise(m, True), *quantise(m.square() + 0.1 * values(n, False, 2), False))


def floats(states):
    codes_m, scale_m, codes_v, scale_v = states
    return dequantise(codes_m, scale_m, True), dequantise(codes_v, scale_v, False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_adamw_s_whose_averages_are_rounded_afterwards(backend, dtype):
    param, grad, states = problem(dtype=dtype)
    options = {"lr": 0.02, "weight_decay": 0.1, "seed": torch.tensor(3), "backend": backend}
    weight, m, v = adamw(param, grad, *floats(states), torch.tensor(5.0), **options)
    outs = (param.clone(), *(t.clone() for t in states))
    results = adamw_8bit(*(outs[0], grad, *outs[1:]), torch.tensor(5.0), **options, out=outs)
    assert all(a is b for a, b in zip(results, outs, strict=True))
    torch.testing.assert_close(results[0], weight, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=2e-7)
    for exact, codes, scales, signed in ((m, *results[1:3], True), (v, *results[3:5], False)):
        assert torch.equal(codes, quantise(exact, signed)[0])
        torch.testing.assert_close(scales, quantise(exact, signed)[1], rtol=2e-7, atol=0)


@pytest.mark.interp
def test_kernels_have_the_reference_s_codes():
    """Over all decades, in blocks of zeros, of one value, of values next to the smallest, and of other ends."""
    param, _, states = problem(8 * BLOCK + 7)
    grad = values(8 * BLOCK + 7, seed=5)
    grad[:BLOCK], grad[BLOCK : 2 * BLOCK], grad[2 * BLOCK : 3 * BLOCK] = 0.0, -2.0, 1e-30
    grad[3 * BLOCK], grad[5 * BLOCK] = torch.nan, torch.inf
    states = (torch.where(torch.arange(len(grad)) < 6 * BLOCK, 127, states[0]).to(torch.uint8), *states[1:])
    ours, theirs = (adamw_8bit(param, grad, *states, torch.tensor(1.0), backend=b) for b in ("triton", "torch"))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert (ours[1][:BLOCK] == 127).all() and ours[2][:1] == 0
    assert (ours[1][3 * BLOCK : 4 * BLOCK] == 255).all() and ours[2][3].isnan() and ours[2][5].isinf()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_follow_the_order_of_elements(backend):
    param, grad, states = problem(600, torch.bfloat16)
    arguments = [t.view(20, 30) if len(t) == 600 else t for t in (param, grad, *states)]
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in arguments]
    options = {"seed": torch.tensor(2), "backend": backend}
    for other in (turned, [turned[0], arguments[1], *turned[2:]]):
        results = adamw_8bit(*other, torch.tensor(2.0), **options)
        assert all(map(torch.equal, results, adamw_8bit(*arguments, torch.tensor(2.0), **options)))
    outs = (turned[0], *turned[2:])
    adamw_8bit(*turned, torch.tensor(2.0), **options, out=outs)
    assert all(map(torch.equal, outs, results))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_changes_after_an_overflow(backend):
    param, grad, states = problem(300, torch.bfloat16)
    grad[::2] = torch.inf
    outs = (param, *states)
    before = [t.clone() for t in outs]
    scalars = {"found_inf": torch.tensor(1.0), "seed": torch.tensor(5), "grad_scale": torch.tensor(1024.0)}
    adamw_8bit(param, grad, *states, torch.tensor(3.0), **scalars, out=outs, backend=backend)
    assert all(map(torch.equal, outs, before))


def test_gradients_are_refused():
    param, grad, states = problem(8)
    with pytest.raises(InputError, match=r"a gradient through the step.*torch\.no_grad"):
        adamw_8bit(param.requires_grad_(), grad, *states, torch.tensor(1.0))
