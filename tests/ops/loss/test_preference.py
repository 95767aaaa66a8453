"""Losses on log-probabilities: those of a linear layer, formulas of their papers in other words, gradients."""

import math

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.loss import preference

DOUBLE = {"dtype": torch.float64}


def test_log_probs_of_a_linear_layer():
    hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    target = torch.randint(0, 20, (2, 5))
    target[1, 3:] = -100
    log_probs = preference.linear_log_probs(hidden, weight, target, chunk_rows=3)
    every = torch.log_softmax(hidden @ weight.T, -1)
    wanted = every.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)
    torch.testing.assert_close(log_probs, wanted)
    mask = target != -100
    ours, theirs = (preference.sequence_log_probs(t, mask, average=True) for t in (log_probs, wanted))
    torch.testing.assert_close(ours, theirs)
    factors = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(
        *(torch.autograd.grad((t * factors).sum(), (hidden, weight)) for t in (ours, theirs)), rtol=1e-4, atol=1e-5
    )


def negative(*shape):
    return (-3 * torch.rand(*shape, **DOUBLE) - 0.01).requires_grad_()


def test_dpo_by_probabilities():
    chosen, rejected, a, b = (negative(4) for _ in range(4))
    odds = (chosen.exp() / a.exp()) ** 0.3 / (rejected.exp() / b.exp()) ** 0.3
    wanted = torch.log1p(1 / odds).mean()
    torch.testing.assert_close(preference.dpo_loss(chosen, rejected, a, b, beta=0.3), wanted)
    assert preference.dpo_loss(a, a, b, b).item() == pytest.approx(math.log(2))
    smooth = preference.dpo_loss(chosen, rejected, a, b, beta=0.3, label_smoothing=0.25)
    torch.testing.assert_close(smooth, 0.75 * wanted + 0.25 * torch.log1p(odds).mean())


def test_orpo_and_simpo_by_probabilities():
    chosen, rejected = negative(5), negative(5)
    p, q = chosen.exp(), rejected.exp()
    odds = (p / (1 - p)) / (q / (1 - q))
    wanted = -p.log().mean() - 0.2 * torch.log(odds / (1 + odds)).mean()
    torch.testing.assert_close(preference.orpo_loss(chosen, rejected, beta=0.2), wanted)
    margin = (p / q) ** 2 * math.exp(-0.5)
    torch.testing.assert_close(
        preference.simpo_loss(chosen, rejected, gamma=0.5), -torch.log(margin / (1 + margin)).mean()
    )


def test_orpo_near_certainty():
    """1 - e^x of x = -1e-12, and of a probability of 0, where the formula as it stands gives infinities."""
    chosen = torch.tensor([-1e-12], **DOUBLE).requires_grad_()
    loss = preference.orpo_loss(chosen, torch.tensor([-800.0], **DOUBLE))
    assert 0 <= loss.item() < 1e-10
    assert torch.autograd.grad(loss, chosen)[0].isfinite().all()


def test_kto_by_probabilities():
    x, reference, desirable = negative(4), negative(4), torch.tensor([True, False, True, False])
    q = (x.exp() / reference.exp() / math.exp(0.4)) ** 0.5
    losses = torch.where(desirable, 2 * (1 - q / (1 + q)), 1 - 1 / (1 + q))
    made = preference.kto_loss(x, reference, desirable, kl=0.4, beta=0.5, desirable_weight=2.0)
    torch.testing.assert_close(made, losses.mean())
    torch.testing.assert_close(
        preference.kto_loss(x, reference, desirable, kl=-1.0), preference.kto_loss(x, reference, desirable)
    )


def test_grpo_token_by_token():
    x, old, reference = (negative(2, 3).detach() for _ in range(3))
    advantages, mask = torch.tensor([1.5, -0.5], **DOUBLE), torch.tensor([[1, 1, 0], [1, 1, 1]])
    wanted = []
    for b in range(2):
        for s in range(3):
            q, a = math.exp(x[b, s] - old[b, s]), advantages[b].item()
            kl = math.exp(reference[b, s] - x[b, s]) - (reference[b, s] - x[b, s]).item() - 1
            wanted.append(mask[b, s].item() * (0.1 * kl - min(q * a, min(max(q, 0.8), 1.3) * a)))
    options = {"mask": mask, "reference": reference, "beta": 0.1, "clip": (0.2, 0.3)}
    loss = preference.grpo_loss(x, old, advantages, **options)
    assert loss.item() == pytest.approx((sum(wanted[:3]) / 2 + sum(wanted[3:]) / 3) / 2)
    loss = preference.grpo_loss(x, old, advantages, per_token=True, **options)
    assert loss.item() == pytest.approx(sum(wanted) / 5)


def test_gradients():
    one, two = negative(4), negative(4)
    a, b = negative(4).detach(), negative(4).detach()
    chosen = torch.tensor([True, False, True, False])
    for function in (
        lambda x, y: preference.dpo_loss(x, y, a, b, label_smoothing=0.1),
        preference.orpo_loss,
        preference.simpo_loss,
        lambda x, y: preference.kto_loss(x, y, chosen, kl=0.3),
    ):
        assert torch.autograd.gradcheck(function, (one, two))
        assert torch.autograd.gradgradcheck(function, (one, two))
    advantage = torch.ones(1, **DOUBLE)
    near = a[None] + 0.05  # inside of the clip
    options = {"reference": b[None], "beta": 0.1}
    grpo = lambda x: preference.grpo_loss(x[None], near, advantage, **options)  # noqa: E731
    assert torch.autograd.gradcheck(grpo, (a.clone().requires_grad_(),))


def test_shapes_that_do_not_fit():
    with pytest.raises(InputError, match=r"dpo_loss: shapes are \(3,\), \(2,\)"):
        preference.dpo_loss(torch.zeros(3), torch.zeros(2), torch.zeros(3), torch.zeros(3))
    with pytest.raises(InputError, match=r"needs \(B, S\), \(B,\)"):
        preference.grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(InputError, match=r"needs \(B, S\) of both"):
        preference.sequence_log_probs(torch.zeros(2, 3), torch.zeros(2))
