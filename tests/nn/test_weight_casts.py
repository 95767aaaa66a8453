"""Float8 copies of a weight: kept for all calls that see one version of it, made again when it was written."""

import subprocess
import sys

import pytest
import torch
from tests.nn.test_fp8_linear import HALF, K, N, assert_rounded, layer, rounded
from torch import nn as torch_nn

from tilewright.nn import fp8_linear
from tilewright.nn.fp8_linear import FP8Linear
from tilewright.ops.quant.layout import BLOCK, TOKEN


@pytest.fixture
def casts(monkeypatch) -> list[bool]:
    """`transpose` of every cast of a weight."""
    seen: list[bool] = []
    real = fp8_linear.per_block_cast_to_fp8

    def counted(x, *, transpose=False):
        seen.append(transpose)
        return real(x, transpose=transpose)

    monkeypatch.setattr(fp8_linear, "per_block_cast_to_fp8", counted)
    return seen


def test_micro_batches_share_the_cast_of_a_weight(casts):
    ours = layer()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            ours(torch.randn(4, K).to(HALF).requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert casts == [False, True] * 2
    with torch.no_grad():
        ours(torch.randn(4, K).to(HALF))
        ours(torch.randn(1, K).to(HALF))
    assert casts == [False, True] * 2 + [False]


def other(ours: FP8Linear) -> torch.Tensor:
    return torch.randn_like(ours.weight)


CHANGES = {
    "in place": lambda ours: ours.weight.copy_(other(ours)),
    "another parameter": lambda ours: setattr(ours, "weight", torch_nn.Parameter(other(ours))),
    "other memory": lambda ours: setattr(ours.weight, "data", other(ours)),
    "a state_dict": lambda ours: ours.load_state_dict({"weight": other(ours), "bias": ours.bias.clone()}),
    "uncounted": lambda ours: (ours.weight.data.copy_(other(ours)), ours.requantise()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_weight_is_cast_again(change):
    ours, x = layer(), torch.randn(4, K).to(HALF)
    with torch.no_grad():
        before = ours(x)
        change(ours)
        after = ours(x)
    assert not torch.equal(before, after)
    assert_rounded(after, rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())


@pytest.mark.parametrize("kind", ["for loop", "foreach", "fused"])  # fused: `_version` stays
def test_a_step_of_any_optimizer_is_seen(kind):
    ours, x = layer(torch.float32), torch.randn(4, K)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.5, foreach=kind == "foreach", fused=kind == "fused")
    ours(x).sum().backward()
    optimizer.step()
    assert_rounded(ours(x), rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())


def test_a_step_of_another_model_leaves_the_cast_alone(casts):
    ours, x = layer(), torch.randn(4, K).to(HALF).requires_grad_()
    mine = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x).sum().backward()
    mine.step()
    ours(x).sum().backward()
    del casts[:]
    stranger = torch_nn.Linear(2, 2)
    other_optimizer = torch.optim.AdamW(stranger.parameters(), fused=True)
    stranger(torch.ones(1, 2)).sum().backward()
    other_optimizer.step()
    ours(x).sum().backward()
    assert casts == []
    mine.step()
    ours(x).sum().backward()
    assert casts == [False, True]


def test_a_step_on_a_view_of_the_weight_is_seen(casts):
    """One flat parameter for all, as FSDP has."""
    ours, x = layer(torch.float32), torch.randn(4, K)
    flat = torch_nn.Parameter(ours.weight.detach().flatten())
    ours.weight = torch_nn.Parameter(flat.detach().view(N, K))
    optimizer = torch.optim.SGD([flat], lr=0.5)
    ours.eval()(x)
    flat.grad = torch.ones_like(flat)
    optimizer.step()
    with torch.no_grad():
        assert_rounded(ours(x), rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())
    assert len(casts) == 2


def test_a_trained_weight_with_its_master_elsewhere_is_cast_after_any_step():
    ours, x = layer(), torch.randn(4, K).to(HALF).requires_grad_()
    master = ours.weight.detach().float().clone().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.5)
    ours(x).sum().backward()
    master.grad = ours.weight.grad.float()
    optimizer.step()
    ours.weight.data.copy_(master.detach())
    with torch.no_grad():
        assert_rounded(ours(x), rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())


def test_memory_that_is_used_again_is_not_taken_for_the_old_one():
    """`.data = ` counts no write, and the allocator gives an address away again."""
    ours, x = layer().eval().requires_grad_(False), torch.randn(4, K).to(HALF)
    ours(x)
    for _ in range(20):
        ours.weight.data = torch.randn(N, K).to(HALF)
        assert_rounded(ours(x), rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())


def test_optimizers_are_watched_from_the_first_kept_cast_on():
    """In a process of its own: others have kept casts in this one."""
    code = """
import torch, tilewright.nn as nn
from torch.optim import optimizer
assert not optimizer._global_optimizer_post_hooks
layer = nn.FP8Linear(8, 8)
assert not optimizer._global_optimizer_post_hooks
layer(torch.ones(1, 8))
assert len(optimizer._global_optimizer_post_hooks) == 1
nn.FP8Linear(8, 8)(torch.ones(1, 8))
assert len(optimizer._global_optimizer_post_hooks) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
