"""Statistics and losses of routers beside transformers', and routers without a kernel."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.moe import balance


def test_the_loss_of_mixtral():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(50, 6, requires_grad=True)
    _, ids = ops.topk_softmax(logits, 2)
    mask = (torch.rand(50) < 0.7).float()
    for options, theirs in (({}, None), ({"mask": mask}, mask.view(5, 10))):
        ours = balance.load_balancing_loss(logits, ids, **options)
        wanted = load_balancing_loss_func((logits,), 6, 2, theirs)
        torch.testing.assert_close(ours, wanted)
        (a,), (b,) = torch.autograd.grad(ours, logits), torch.autograd.grad(wanted, logits)
        torch.testing.assert_close(a, b)


def test_even_use_is_k():
    ids = torch.tensor([[0, 1], [2, 3]])
    torch.testing.assert_close(balance.load_balancing_loss(torch.zeros(2, 4), ids), torch.tensor(2.0))


def test_the_z_loss():
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    assert float(balance.router_z_loss(torch.zeros(3, 4))) == pytest.approx(
        torch.log(torch.tensor(4.0)).square().item()
    )
    (gradient,) = torch.autograd.grad(balance.router_z_loss(logits), logits)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    torch.testing.assert_close(gradient, 2 * lse * torch.softmax(logits, -1) / 7, rtol=1e-5, atol=1e-7)
    masked = balance.router_z_loss(logits, mask=torch.tensor([1.0] * 3 + [0.0] * 4))
    torch.testing.assert_close(masked, balance.router_z_loss(logits[:3]))


def test_statistics():
    load = balance.load_stats(torch.tensor([[0, 2], [2, -1], [2, 0]], dtype=torch.int32), 4)
    assert load.counts.tolist() == [2, 0, 3, 0]
    assert float(load.imbalance) == pytest.approx(2.4)
    assert int(load.dropped) == 1
    assert balance.load_stats(torch.empty(0, 2, dtype=torch.int64), 3).fraction.tolist() == [0.0] * 3


def test_switch_drops_what_comes_after_the_capacity():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [5.0, 0.0]])
    weights, ids = balance.switch(logits, capacity=2)
    assert ids.tolist() == [[0], [0], [1], [-1]]
    torch.testing.assert_close(weights, torch.softmax(logits, -1).amax(-1, keepdim=True))
    assert balance.switch(logits)[1].tolist() == [[0], [0], [1], [0]]


def test_experts_that_choose():
    logits = torch.randn(12, 3, requires_grad=True)
    weights, tokens = balance.expert_choice(logits, 4)
    p = torch.softmax(logits, -1)
    for column, chosen in zip(p.detach().mT.tolist(), tokens.tolist(), strict=True):
        assert chosen == sorted(range(12), key=lambda t, column=column: -column[t])[:4]
    spread, ids = balance.ids_of_choice(weights, tokens, 12)
    assert balance.load_stats(ids, 3).counts.tolist() == [4, 4, 4]
    torch.testing.assert_close(spread[ids >= 0], p[ids >= 0])
    x, w1, w2 = torch.randn(12, 8), torch.randn(3, 8, 8), torch.randn(3, 8, 4)
    y = ops.fused_moe(x, w1, w2, spread, ids)
    (gradient,) = torch.autograd.grad(y.sum(), logits)
    assert gradient.abs().sum() > 0


def test_hashed_experts_are_even_and_repeat():
    tokens = torch.arange(4000)
    weights, ids = balance.hashed(tokens, 8, 2)
    assert torch.equal(ids, balance.hashed(tokens, 8, 2)[1])
    assert (ids[:, 0] != ids[:, 1]).all()
    assert float(weights.sum(1).mean()) == 1.0
    assert float(balance.load_stats(ids, 8).imbalance) < 1.05


def test_what_is_refused():
    with pytest.raises(InputError, match=r"needs \(T, E\)"):
        balance.router_z_loss(torch.zeros(3))
    with pytest.raises(InputError, match="capacity is 9"):
        balance.expert_choice(torch.zeros(4, 2), 9)
    with pytest.raises(InputError, match="k is 5"):
        balance.hashed(torch.arange(3), 4, 5)
    with pytest.raises(InputError, match="topk_ids is .* torch.float32"):
        balance.load_stats(torch.zeros(3, 2), 4)
    with pytest.raises(InputError, match="agree in T"):
        balance.load_balancing_loss(torch.zeros(3, 2), torch.zeros(4, 1, dtype=torch.int64))
