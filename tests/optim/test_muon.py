"""Muon is torch's within bf16, in batches of equal shapes, and refuses what is no matrix."""

import copy

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from tilewright.errors import InputError
from tilewright.optim import Muon
from tilewright.optim.muon import orthogonal

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(12, 20), (12, 20), (33, 8), (12, 20), (1, 6)]


def parameters(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in SHAPES]


def train(optimizer, params, numbers):
    for number in numbers:
        g = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
        (torch.bfloat16, {"adjust_lr_fn": "original"}),
    ],
)
def test_steps_are_torch_s_within_bf16(dtype, options):
    """Both round the iterations to bf16: in a step they differ by at most 6 % of it, as the square root of the mean."""
    mine, theirs = parameters(dtype), parameters(dtype)
    options = {"lr": 0.02, "weight_decay": 0.05, **options}
    ours, reference = Muon(mine, **options), torch.optim.Muon(theirs, **options)
    for number in range(3):
        before = [p.detach().float().clone() for p in theirs]
        train(ours, mine, [number]), train(reference, theirs, [number])
        for p, q, old in zip(mine, theirs, before, strict=True):
            mine_p, theirs_p = p.detach().float(), q.detach().float()
            rounding = 2.0**-8 * old.norm() if dtype == torch.bfloat16 else 0.0
            assert (mine_p - theirs_p).norm() <= 0.06 * (theirs_p - old).norm() + rounding
            torch.testing.assert_close(ours.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"])
            q.data.copy_(p.data)


@pytest.mark.parametrize("shape", [(3, 40, 24), (2, 12, 60)])
def test_singular_values_become_about_one(shape):
    """The second is wide enough for several iterations at once."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    result, scale = orthogonal(x.bfloat16(), COEFFICIENTS, 5, 1e-7)
    assert result.shape == x.shape
    inner = u.mT @ (result.float() * scale) @ vh.mT
    assert ((inner.diagonal(dim1=1, dim2=2) - 0.95).abs() < 0.35).all()
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 0.05
    zeros = torch.zeros(1, 4, 3).bfloat16()
    assert torch.equal(orthogonal(zeros.clone(), COEFFICIENTS, 5, 1e-7)[0], zeros)


def spectra():
    """Matrices whose singular values are alike, equal, over five decades, and eight with noise."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(48, 200, generator=g)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    few = torch.randn(48, 8, generator=g) @ torch.randn(8, 200, generator=g)
    return [x, x.T, x[:, :48], vh, u @ torch.logspace(0, -5, 48).diag() @ vh, few + 1e-3 * x]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_iterations_round_no_more_than_twice_as_much_as_torch_s(steps):
    a, b, c = COEFFICIENTS
    for matrix in spectra():
        x = matrix.bfloat16()
        exact = x.double() / x.double().norm()
        for _ in range(steps):
            gram = exact @ exact.T
            exact = a * exact + (b * gram + c * gram @ gram) @ exact
        theirs = _zeropower_via_newtonschulz(x.float(), COEFFICIENTS, steps, 1e-7).double()
        mine, scale = orthogonal(x[None].clone(), COEFFICIENTS, steps, 1e-7)
        assert (mine[0].double() * scale - exact).norm() <= 2 * (theirs - exact).norm()


def test_many_iterations_do_not_leave_the_range():
    """a to the power of 60 is above 10^32: factors are multiplied in before that."""
    result, scale = orthogonal(torch.eye(6).bfloat16()[None] * 3, COEFFICIENTS, 60, 1e-7)
    values = torch.linalg.svdvals(result.float() * scale)
    assert ((values > 0.6) & (values < 1.25)).all()


def test_a_batch_gives_what_each_matrix_gives_alone():
    together, alone = parameters(), parameters()
    train(Muon(together), together, [1])
    g = torch.Generator().manual_seed(1)
    for p in alone:
        p.grad = torch.randn(p.shape, generator=g)
        Muon([p]).step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-5)


def test_state_and_a_rate_that_is_a_tensor():
    (mine, theirs) = parameters(), parameters()
    ours, reference = Muon(mine, lr=torch.tensor(0.01)), torch.optim.Muon(theirs, lr=0.01)
    train(reference, theirs, range(2))
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01
    ours.param_groups[0]["lr"] = torch.tensor(0.01)
    for p, q in zip(mine, theirs, strict=True):
        p.data.copy_(q.data)
    train(ours, mine, [5]), train(reference, theirs, [5])
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-3)


def test_what_is_refused_is_named():
    matrix, vector = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match=r"shape \(3,\); needs matrices \(M, N\). Use AdamW"):
        Muon([matrix, vector])
    optimizer = Muon([matrix])
    with pytest.raises(InputError, match=r"shape \(3,\)"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1
    for options, match in [
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'; needs 'original'"),
        ({"ns_steps": 100}, "ns_steps 0 to 99"),
        ({"ns_coefficients": (0.0, 1.0, 1.0)}, r"ns_coefficients\[0\] is 0"),
    ]:
        with pytest.raises(InputError, match=match):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], **options})
    matrix.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(InputError, match="is sparse"):
        optimizer.step()
