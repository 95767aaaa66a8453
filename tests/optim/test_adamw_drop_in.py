"""AdamW takes the place of torch's: steps, groups, schedulers, scalers, checkpoints."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tilewright.errors import InputError
from tilewright.ops.optim.dynamic_map import from_codes
from tilewright.optim import AdamW

TOLERANCE = {"rtol": 3e-6, "atol": 3e-7}


def parameters(dtype=torch.float32):
    """A matrix, one in another order of memory, a part of a tensor, a scalar, and one without elements."""
    g = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(5, 8, generator=g),
        torch.randn(8, 3, generator=g).t(),
        torch.randn(4, 6, generator=g)[:, ::2],
    ]
    tensors += [torch.randn((), generator=g), torch.empty(0, 3)]
    return [nn.Parameter(t.to(dtype)) for t in tensors]


def give_gradients(params, number):
    g = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def pair(ours_options=None, **options):
    """The same parameters twice, under torch's optimizer and ours."""
    mine, theirs = parameters(), parameters()
    return (mine, AdamW(mine, **options, **(ours_options or {}))), (theirs, torch.optim.AdamW(theirs, **options))


def train(optimizer, params, numbers, schedule=None):
    for number in numbers:
        give_gradients(params, number)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def assert_same(mine, theirs, **tolerance):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or TOLERANCE))


@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-3}])
def test_twenty_steps_are_torch_s(options):
    (mine, ours), (theirs, reference) = pair(lr=0.05, **options)
    for number in range(20):
        train(ours, mine, [number])
        train(reference, theirs, [number])
        assert_same(mine, theirs)


def test_groups_schedulers_and_a_rate_that_is_a_tensor():
    (mine, ours), (theirs, reference) = pair(lr=0.05)
    mine.append(nn.Parameter(torch.ones(3))), theirs.append(nn.Parameter(torch.ones(3)))
    for optimizer, params in ((ours, mine), (reference, theirs)):
        optimizer.add_param_group({"params": [params[-1]], "lr": torch.tensor(0.3), "weight_decay": 0.5})
        optimizer.param_groups[0]["betas"] = (0.7, 0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        train(optimizer, params, range(5), schedule)
    assert ours.param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**5)
    assert_same(mine, theirs)


def test_parameters_without_a_gradient_and_a_closure():
    (mine, ours), _ = pair()
    assert ours.step() is None
    before = [p.detach().clone() for p in mine]

    def closure():
        assert torch.is_grad_enabled()
        ours.zero_grad()
        loss = mine[0].square().sum()
        loss.backward()
        return loss

    assert ours.step(closure) == before[0].square().sum()
    assert not torch.equal(mine[0], before[0])
    assert all(map(torch.equal, mine[1:], before[1:]))
    assert len(ours.state) == 1


def test_torch_loads_our_state_and_we_load_torch_s():
    (mine, ours), (theirs, reference) = pair(lr=0.05)
    train(ours, mine, range(3)), train(reference, theirs, range(3))
    (one, ours2), (other, reference2) = pair(lr=0.01)
    for new, old in zip((*one, *other), (*theirs, *mine), strict=True):
        new.data.copy_(old.data)
    ours2.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference2.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert ours2.param_groups[0]["lr"] == reference2.param_groups[0]["lr"] == 0.05
    for optimizer, params in ((ours, mine), (reference, theirs), (ours2, one), (reference2, other)):
        train(optimizer, params, range(3, 6))
    for params in (mine, one, other):
        assert_same(params, theirs)


@pytest.mark.parametrize("way", ["load_state_dict", "pickle"])
def test_a_checkpoint_continues_bit_for_bit(way):
    """Torch's loading alone would round masters and float32 states to bf16."""
    options = {"stochastic_rounding": True, "seed": 4}
    params = parameters(torch.bfloat16)
    groups = [{"params": params[:1], "master_weights": True}, {"params": params[1:], "state_dtype": torch.bfloat16}]
    ours = AdamW(groups, **options)
    train(ours, params, range(3))
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(ours))
        again = [p for group in copied.param_groups for p in group["params"]]
    else:
        again = [nn.Parameter(p.detach().clone()) for p in params]
        copied = AdamW([{"params": again[:1]}, {"params": again[1:]}])
        copied.load_state_dict(ours.state_dict())
    for optimizer, those in ((ours, params), (copied, again)):
        train(optimizer, those, range(3, 5))
    assert all(map(torch.equal, params, again))
    for p, q in zip(params, again, strict=True):
        assert {k: v.dtype for k, v in ours.state[p].items()} == {k: v.dtype for k, v in copied.state[q].items()}
        assert all(map(torch.equal, ours.state[p].values(), copied.state[q].values()))
    assert ours.state[params[0]]["master"].dtype == torch.float32
    assert ours.state[params[1]]["exp_avg"].dtype == torch.bfloat16


def large(dtype=torch.float32):
    """4096 elements and more: one in another order of memory, one a part of a tensor.  And a small parameter."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(64, 65, generator=g), torch.randn(70, 64, generator=g).t()]
    tensors += [torch.randn(64, 140, generator=g)[:, ::2], torch.randn(4095, generator=g)]
    return [nn.Parameter(t.to(dtype)) for t in tensors]


def test_averages_of_8_bits_and_their_memory():
    """Two steps of averages that are rounded once: the first is torch's, the second nearly."""
    mine, theirs = large(), large()
    ours, reference = AdamW(mine, lr=0.01, state_dtype=torch.uint8), torch.optim.AdamW(theirs, lr=0.01)
    train(ours, mine, [0]), train(reference, theirs, [0])
    assert_same(mine, theirs)
    train(ours, mine, [1]), train(reference, theirs, [1])
    for p, q in zip(mine, theirs, strict=True):
        assert (p - q).norm() <= 0.02 * 0.01 * p.numel() ** 0.5
    for p in mine[:3]:
        states = [t for t in ours.state[p].values() if t.dim()]
        assert sum(t.nbytes for t in states) / p.numel() == pytest.approx(2 + 8 / 256, rel=0.02)
    assert ours.state[mine[3]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True, "seed": 4}])
def test_a_checkpoint_of_8_bits_continues_bit_for_bit(options):
    params = large(torch.bfloat16)
    ours = AdamW(params, state_dtype=torch.uint8, **options)
    train(ours, params, range(2))
    again = [nn.Parameter(p.detach().clone()) for p in params]
    copied = AdamW(again)
    copied.load_state_dict(ours.state_dict())
    for optimizer, those in ((ours, params), (copied, again)):
        train(optimizer, those, [2])
    assert all(map(torch.equal, params, again))
    assert all(map(torch.equal, ours.state[params[1]].values(), copied.state[again[1]].values()))


def test_averages_of_32_bits_become_8_and_8_become_32():
    params, theirs = large()[:2], large()[:2]
    reference = torch.optim.AdamW(theirs, lr=0.01)
    train(reference, theirs, range(2))
    ours = AdamW(params, lr=0.01, state_dtype=torch.uint8)
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert ours.param_groups[0]["state_dtype"] == torch.uint8
    for p, q in zip(params, theirs, strict=True):
        p.data.copy_(q.data)
    train(ours, params, [2]), train(reference, theirs, [2])
    assert "exp_avg" not in ours.state[params[0]] and ours.state[params[1]]["exp_avg_codes"].dtype == torch.uint8
    for p, q in zip(params, theirs, strict=True):
        assert (p - q).norm() <= 0.02 * 0.01 * p.numel() ** 0.5
    foreign = torch.optim.AdamW(theirs)
    foreign.load_state_dict(copy.deepcopy(ours.state_dict()))
    with pytest.raises(KeyError, match="exp_avg"):
        train(foreign, theirs, [3])
    state = ours.state[params[1]]
    before = from_codes(state["exp_avg_codes"], state["exp_avg_scale"], signed=True)
    ours.param_groups[0] |= {"state_dtype": torch.float32, "betas": (1 - 1e-9, 0.999)}
    train(ours, params, [3])
    assert "exp_avg_codes" not in state and "exp_avg_scale" not in state
    torch.testing.assert_close(state["exp_avg"], before, rtol=1e-6, atol=1e-8)


def test_small_steps_need_a_master_or_rounding_at_random():
    """100 steps of 1e-4 from 1 in bf16, whose neighbours are 4e-3 and 8e-3 away."""
    moved = {}
    for name, options in {
        "nearest": {}, "master": {"master_weights": True}, "random": {"stochastic_rounding": True}
    }.items():  # fmt: skip
        p = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[name] = float(1 - p.detach().float().mean())
    assert moved["nearest"] == 0
    assert moved["master"] == pytest.approx(0.01, abs=0.002)
    assert moved["random"] == pytest.approx(0.01, abs=0.0005)  # 5 deviations of the mean of 2000


def test_a_grad_scaler_skips_overflows_without_a_host_read():
    (mine, ours), (theirs, reference) = pair(lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    for number in range(4):
        give_gradients(mine, number), give_gradients(theirs, number)
        for p in mine:
            p.grad.mul_(1024.0)
        if number == 2:
            mine[0].grad[0, 0] = torch.inf
            before = [p.detach().clone() for p in mine]
            scaler.step(ours)
            assert all(map(torch.equal, mine, before))
        else:
            scaler.step(ours), reference.step()
        scaler._per_optimizer_states.clear()  # the scale stays
    assert ours.state[mine[0]]["step"] == 3
    assert_same(mine, theirs)


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_clipping_in_the_step_is_clipping_before_it(limit):
    (mine, ours), (theirs, reference) = pair(lr=0.05)
    ours = copy.deepcopy(AdamW([{"params": mine[:1]}, {"params": mine[1:]}], lr=0.05, max_grad_norm=limit))
    mine = [p for group in ours.param_groups for p in group["params"]]
    for number in range(4):
        give_gradients(mine, number), give_gradients(theirs, number)
        ours.grad_scale = torch.tensor(8.0)  # as a GradScaler would
        for p in mine:
            p.grad.mul_(8.0)
        norm = torch.nn.utils.clip_grad_norm_(theirs, limit)
        ours.step(), reference.step()
        torch.testing.assert_close(ours.grad_norm, norm)
    assert_same(mine, theirs)


def test_what_is_refused_is_named_and_nothing_is_written():
    p = nn.Parameter(torch.ones(3))
    for options, match in [
        ({"amsgrad": True}, "amsgrad=True; needs False"),
        ({"differentiable": True}, "differentiable=True; needs False"),
        ({"state_dtype": torch.float16}, "state_dtype is torch.float16"),
        ({"seed": -1}, "seed is -1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ]:
        with pytest.raises(InputError, match=match):
            AdamW([p], **options)
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = AdamW([p, *table.parameters()])
    p.grad = torch.ones(3)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match=r"a gradient of shape \(5, 2\) is sparse .*SparseAdam"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
    foreign = torch.optim.AdamW([p], amsgrad=True).state_dict()
    with pytest.raises(InputError, match="amsgrad=True"):
        AdamW([p]).load_state_dict(foreign)
