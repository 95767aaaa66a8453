"""Rows of which only rounding is left: another order of summation passes, and a real error in such a row does not."""

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Sample, contract
from tilewright.validate.jitter import JitteredTerms, jittered
from tilewright.validate.oracle import JITTERS, truth
from tilewright.validate.rule import standard

ONE_KEY = {"B": 2, "H": 4, "H_kv": 2, "S": 1, "D": 32, "causal": True}
DTYPES = [torch.float32, torch.bfloat16]
SEEDS = range(20)
CPU = torch.device("cpu")


def in_turn(terms: Tensor) -> Tensor:
    """The sum over the last dimension, one term after the other."""
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


def gradients_to_one_key(sample: Sample, do: Tensor, error: float = 0.0) -> dict[int, Tensor]:
    """dq and dk of attention to a single key: dp and delta are one sum in two orders, and cancel.

    error: of delta in the first row, relative to the norm of its terms.
    """
    q, k, v = (t.float() for t in sample.args[:3])
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    terms = do.float() * values
    delta = in_turn(terms.flip(-1))
    delta[0, 0] += error * terms[0, 0].norm()
    ds = scale * (in_turn(terms) - delta)[..., None]
    dk = (ds * q).unflatten(1, (-1, group)).sum(2)
    return {0: (ds * keys).to(do.dtype), 1: dk.to(do.dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_of_sums_over_one_key_passes_and_an_error_does_not(dtype):
    fmha = contract("fmha")
    for seed in SEEDS:
        sample = fmha.inputs(ONE_KEY, dtype, CPU, seed)
        wanted = truth(fmha, sample, seed)
        for error, right in ((0.0, True), (1e-3, False)):
            ours = gradients_to_one_key(sample, wanted.cotangents[0], error)
            faults = {i: wanted.gradients[i].judge(t).faults for i, t in ours.items()}
            assert right == (not any(faults.values())), (seed, faults)
            assert right or any("row 0 off by" in fault for fault in faults[0]), (seed, faults)


def left_of(terms: Tensor, k: Tensor, noise: torch.Generator) -> Tensor:
    """Rows (dp - delta) k of a gradient that is 0: dp and delta are sums of the same terms."""
    return (jittered(terms, noise).sum(-1) - jittered(terms, noise).sum(-1))[:, None] * k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_may_have_no_error_by_chance(dtype):
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        terms, k = torch.randn(8, 32, generator=g), torch.randn(8, 32, generator=g)
        noisy, zero = [left_of(terms, k, g) for _ in range(JITTERS)], torch.zeros(8, 32)
        wanted = standard("dq", zero.double(), zero.to(dtype), noisy, 3.0)
        ours = left_of(terms, k, g)
        assert wanted.judge(ours.to(dtype)).faults == (), seed
        ours[3] += 1e-3 * k[3]
        assert any("row 3 off by" in fault for fault in wanted.judge(ours.to(dtype)).faults), seed


def test_a_row_of_large_terms_hides_no_error():
    """All rows cancel.  The terms of row 0 are 1000 times larger than those of row 3, which is off by 1e-3 of them."""
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        terms, k = torch.randn(64, 32, generator=g), torch.randn(64, 32, generator=g)
        terms[0] *= 1000
        noisy = [left_of(terms, k, g) for _ in range(JITTERS)]
        wanted = standard("dq", torch.zeros(64, 32).double(), left_of(terms, k, g), noisy, 3.0)
        ours = left_of(terms, k, g)
        assert wanted.judge(ours).faults == (), seed
        ours[3] += 1e-3 * k[3]
        assert any("row 3 off by" in fault for fault in wanted.judge(ours).faults), seed


def test_jitter_is_one_rounding_and_leaves_zeros_and_infinities():
    g, kept = torch.Generator().manual_seed(0), torch.tensor([0.0, torch.inf, -torch.inf, torch.finfo().max, 1e-45])
    assert jittered(kept, g).equal(kept)
    assert jittered(torch.tensor(torch.nan), g).isnan()
    for dtype in (torch.float32, torch.float64):
        numbers = 1 + torch.rand(1000, generator=g, dtype=dtype)
        off = (jittered(numbers, g) - numbers) / torch.finfo(dtype).eps
        assert off.abs().max() <= 1 and off.max() > 0.5 and off.min() < -0.5


def sums(x: Tensor) -> Tensor:
    return ((x @ x.mT).exp() - x.sum(-1)).mean(0)


@pytest.mark.parametrize("how", ["gradient", "second gradient", "forward mode", "functorch"])
def test_terms_are_jittered_in_every_derivative(how):
    """The tangent of a sum is a sum; derivatives stay right to a few roundings."""
    g = torch.Generator().manual_seed(0)
    x, t = (torch.randn(8, 8, generator=g) / 4 for _ in range(2))

    def derive(x, t):
        if how == "functorch":
            return torch.func.vmap(torch.func.grad(lambda row: sums(row[None] * t).sum()))(x)
        if how == "forward mode":
            with forward_mode.dual_level():
                return forward_mode.unpack_dual(sums(forward_mode.make_dual(x, t))).tangent
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(sums(x).square().sum(), x, create_graph=True)
        return dx if how == "gradient" else torch.autograd.grad((dx * t).sum(), x)[0]

    exact = derive(x.double(), t.double())
    with JitteredTerms(torch.float32, g):
        runs = [derive(x, t) for _ in range(2)]
    assert not torch.equal(*runs)
    assert all(0 < (run - exact).norm() < 1e-5 * exact.norm() for run in runs)
