"""A quadratic and a perceptron of two layers converge as under torch's optimizers."""

import pytest
import torch
from torch import nn

from tilewright.optim import AdamW, Muon, clip_grad_norm_


def minimum(make, *, steps=150):
    """The last loss of |A (w - w0)|^2."""
    g = torch.Generator().manual_seed(0)
    a, target = torch.randn(16, 8, generator=g), torch.randn(8, 4, generator=g)
    w = nn.Parameter(torch.zeros(8, 4))
    optimizer = make([w])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (a @ (w - target)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def trained(make, clip, dtype=torch.float32, steps=60):
    """Losses of a perceptron that learns a sine."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 64)[:, None].to(dtype)
    y = (2 * x).sin()
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adamw_trains_as_torch_s():
    ours = trained(lambda params: AdamW(params, lr=0.02), clip_grad_norm_)
    theirs = trained(lambda params: torch.optim.AdamW(params, lr=0.02), nn.utils.clip_grad_norm_)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours[-1] < 0.2 * ours[0]


@pytest.mark.parametrize(
    "options",
    [{"master_weights": True}, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}],
    ids=["master", "bf16"],
)
def test_adamw_trains_in_bf16(options):
    losses = trained(lambda params: AdamW(params, lr=0.02, **options), clip_grad_norm_, torch.bfloat16)
    assert losses[-1] < 0.25 * losses[0]


def test_a_quadratic_reaches_its_minimum():
    assert minimum(lambda params: AdamW(params, lr=0.1, weight_decay=0.0)) < 1e-3
    ours = minimum(lambda params: Muon(params, lr=0.1, weight_decay=0.0))
    assert ours < 1e-2
    assert ours < 4 * minimum(lambda params: torch.optim.Muon(params, lr=0.1, weight_decay=0.0)) + 1e-3


def test_averages_of_8_bits_learn_as_those_of_32():
    """A perceptron with a matrix of 4096 elements: the last losses differ by less than 2 % of the first."""

    def losses(**options):
        torch.manual_seed(0)
        x = torch.randn(64, 16)
        y = x.sin().sum(1, keepdim=True)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = AdamW(model.parameters(), lr=3e-3, **options)
        history = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    ours, wanted = losses(state_dtype=torch.uint8), losses()
    assert abs(ours[-1] - wanted[-1]) < 0.02 * ours[0] and wanted[-1] < 0.1 * wanted[0]
