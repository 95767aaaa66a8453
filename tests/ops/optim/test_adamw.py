"""adamw: torch's step, its rounding at random, and what it writes where."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops import adamw
from tilewright.ops.optim.memory import is_dense, positions

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


def step(number):
    return torch.tensor(float(number))


def problem(n=1000, dtype=torch.float32, state=torch.float32):
    g = torch.Generator().manual_seed(0)
    param, grad, m = (torch.randn(n, generator=g) for _ in range(3))
    return param.to(dtype), grad.to(dtype), m.to(state), (m.square() + 0.1).to(state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_in_place_are_torch_s(backend, maximize):
    param, grad, m, v = problem()
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.02, weight_decay=0.1, maximize=maximize)
    m.zero_(), v.zero_()
    options = {"lr": 0.02, "weight_decay": 0.1, "maximize": maximize, "backend": backend}
    for number in range(1, 4):
        theirs.grad = grad * number
        optimizer.step()
        outs = adamw(param, grad * number, m, v, step(number), **options, out=(param, m, v))
        assert all(a is b for a, b in zip(outs, (param, m, v), strict=True))
        torch.testing.assert_close(param, theirs.detach(), rtol=2e-6, atol=2e-7)
    state = optimizer.state[theirs]
    torch.testing.assert_close(m, state["exp_avg"], rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "beta"), [(1, 0.999), (400, 0.999), (20000, 0.9999), (3, 0.0)])
def test_bias_corrections_keep_their_digits(backend, number, beta):
    """In the difference of 1 and 0.999 float32 has lost three digits."""
    one = torch.ones(1)
    weight, _, _ = adamw(
        one, one, one, one, step(number), lr=1.0, betas=(beta, beta), weight_decay=0.0, backend=backend
    )
    correction = 1 - beta**number
    exact = 1 - 1 / correction / ((1 / correction) ** 0.5 + 1e-8)
    assert abs(float(weight) - exact) <= 3e-7 * (1 + abs(exact - 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_at_random_is_right_in_the_mean(backend):
    """The mean over 100 seeds of 64 values is within 5 of its standard deviations, and every value is a neighbour."""
    g = torch.Generator().manual_seed(1)
    param = torch.randn(64, generator=g).to(torch.bfloat16)
    grad, m = torch.randn(64, generator=g).to(torch.bfloat16), torch.randn(64, generator=g).to(torch.bfloat16)
    v = m.float().square().to(torch.bfloat16) + 1
    exact = adamw(param.double(), grad.double(), m.double(), v.double(), step(9).double(), lr=1e-3, backend="torch")
    runs = [adamw(param, grad, m, v, step(9), lr=1e-3, seed=torch.tensor(seed), backend=backend) for seed in range(100)]
    for values, truth in zip(zip(*runs, strict=True), exact, strict=True):
        stacked = torch.stack(values).double()
        spacing = torch.exp2(truth.abs().log2().floor() - 7)
        assert ((stacked - truth).abs() <= spacing * (1 + 1e-3)).all()
        chance = (truth / spacing).frac().abs()
        deviation = spacing * (chance * (1 - chance) / len(runs)).sqrt()
        assert ((stacked.mean(0) - truth).abs() <= 5 * deviation + 1e-6 * truth.abs()).all()
    first, again = runs[3], adamw(param, grad, m, v, step(9), lr=1e-3, seed=torch.tensor(3), backend=backend)
    assert all(map(torch.equal, first, again))
    others = adamw(param, grad, m, v, step(10), lr=1e-3, seed=torch.tensor(3), backend=backend)
    assert not torch.equal(others[2], first[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_master_is_the_parameter_and_its_copy_is_rounded(backend):
    master, grad, m, v = problem()
    alone = adamw(master, grad.bfloat16().float(), m, v, step(2), backend=backend)
    weight, _, _, copy = adamw(master, grad.bfloat16(), m, v, step(2), copy_dtype=torch.bfloat16, backend=backend)
    assert torch.equal(weight, alone[0])
    assert torch.equal(copy, weight.to(torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_changes_after_an_overflow(backend):
    param, grad, m, v = problem(dtype=torch.bfloat16, state=torch.bfloat16)
    grad[::2] = torch.inf
    before = [t.clone() for t in (param, m, v)]
    scalars = {"found_inf": torch.tensor(1.0), "seed": torch.tensor(5), "grad_scale": torch.tensor(1024.0)}
    adamw(param, grad, m, v, step(3), **scalars, out=(param, m, v), backend=backend)
    assert all(map(torch.equal, (param, m, v), before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_bits_and_results_follow_the_order_of_memory(backend):
    param, grad, m, v = (t.view(6, 4).t() for t in problem(24, torch.bfloat16, torch.bfloat16))
    options = {"seed": torch.tensor(8), "backend": backend}
    results = adamw(param, grad, m, v, step(1), **options)
    flat = adamw(*(t.t().reshape(-1) for t in (param, grad, m, v)), step(1), **options)
    for result, wanted in zip(results, flat, strict=True):
        assert result.stride() == param.stride()
        assert torch.equal(result.t().reshape(-1), wanted)


def test_positions_are_places_in_memory():
    t = torch.empty(2, 3, 5).permute(2, 0, 1)
    assert is_dense(t)
    assert not is_dense(torch.empty(4, 6)[:, ::2])
    assert torch.equal(positions(t).permute(1, 2, 0).flatten(), torch.arange(30))
    assert torch.equal(positions(torch.empty(4, 6)[:, ::2]).flatten(), torch.arange(12))


def test_gradients_and_tangents_are_refused():
    param, grad, m, v = problem(8)
    with pytest.raises(InputError, match=r"a gradient through the step.*torch\.no_grad"):
        adamw(param.requires_grad_(), grad, m, v, step(1))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(grad, grad)
        with pytest.raises(InputError, match="has a tangent"):
            adamw(param.detach(), dual, m, v, step(1))
