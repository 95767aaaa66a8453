"""A patched model in training: compiled, under autocast, in micro-batches, saved and resumed."""

import copy
from pathlib import Path

import pytest
import torch
from tests.models.zoo import build, checkpoint, tokens
from torch import Tensor, nn

from tilewright.models import patch


def training(name: str = "llama", *, patched: bool = True, **options: int) -> nn.Module:
    model = build(name, **options).train()
    if patched:
        patch(model, mode="train", verify=False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], call=None) -> list[float]:
    """The loss of each step; `call` runs the model, compiled or wrapped."""
    losses = []
    for ids in batches:
        loss = (model if call is None else call)(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


BATCHES = [tokens(2, 16, seed) for seed in range(4)]


def test_compiled_steps_are_eager_ones() -> None:
    torch._dynamo.reset()
    eager, compiled = training("gemma2", num_hidden_layers=1), training("gemma2", num_hidden_layers=1)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    losses = steps(compiled, optimizer_of(compiled), BATCHES[:1] * 4, call)
    assert losses == pytest.approx(steps(eager, optimizer_of(eager), BATCHES[:1] * 4), rel=1e-5)
    assert losses[-1] < losses[0]
    assert call(input_ids=BATCHES[0], labels=BATCHES[0], use_cache=False).logits is None


def test_checkpointed_steps_are_plain_ones() -> None:
    plain, checkpointed = training(), training()
    checkpoint(checkpointed, reentrant=False)
    losses = steps(checkpointed, optimizer_of(checkpointed), BATCHES)
    assert losses == pytest.approx(steps(plain, optimizer_of(plain), BATCHES), rel=1e-6)


def test_autocast() -> None:
    """Gradients of bf16 products on float32 weights: float32, as accurate as the unpatched model's."""
    ids = tokens()
    model = training(patched=False)

    def gradient(subject: nn.Module, enabled: bool = True) -> Tensor:
        subject.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = subject(input_ids=ids, labels=ids)
        output.loss.backward()
        assert output.loss.dtype == torch.float32
        return torch.cat([p.grad.flatten() for p in subject.parameters()])

    exact = gradient(copy.deepcopy(model).double(), enabled=False)
    theirs = gradient(model)
    patch(model, mode="train", verify=False)
    ours = gradient(model)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_micro_batches_sum_to_the_batch() -> None:
    ids = tokens(4, 16)
    labels = ids.clone()
    labels[0, :10] = -100  # so that micro-batches hold different numbers of tokens
    items = (labels[:, 1:] != -100).sum()
    whole, parts = training(), training()
    whole(input_ids=ids, labels=labels, num_items_in_batch=items).loss.backward()
    for i in (0, 2):
        parts(input_ids=ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=items).loss.backward()
    for one, other in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    model, plain = training(), training(patched=False)
    steps(model, optimizer_of(model), BATCHES[:1])
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert type(loaded) is type(plain)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    ids = BATCHES[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)


def test_a_resumed_run_is_the_same_bits(tmp_path: Path) -> None:
    model = training()
    optimizer = optimizer_of(model)
    steps(model, optimizer, BATCHES[:2])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    straight = steps(model, optimizer, BATCHES[2:])
    state = torch.load(tmp_path / "state.pt")
    resumed = training()
    resumed.load_state_dict(state["model"])
    again = optimizer_of(resumed)
    again.load_state_dict(state["optimizer"])
    assert steps(resumed, again, BATCHES[2:]) == straight
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
