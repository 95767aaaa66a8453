"""A patch is an act on one model: what it leaves behind after undo, in copies and in the process is nothing."""

import copy
import inspect
import pickle
import sys
from typing import Any, get_args

import pytest
import torch
from tests.models.zoo import MODELS, build, tokens
from torch import Tensor, nn

from tilewright.dispatch import contract
from tilewright.errors import InputError, PatchError
from tilewright.models import patch
from tilewright.models.report import OPS_OF_KIND, Patchable
from tilewright.models.specialise import Patched


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def inside(model: nn.Module) -> list[tuple[str, type, Any, list[str], list[int]]]:
    """All of a module that a patch could change: class, forward, attribute names, and the objects behind them."""
    return [
        (path, type(m), inspect.getattr_static(m, "forward"), list(vars(m)), [id(value) for value in vars(m).values()])
        for path, m in model.named_modules()
    ]


@pytest.mark.parametrize("name", MODELS)
def test_undo_is_bit_identical(name: str) -> None:
    model = build(name)
    before, expected = inside(model), logits(model)
    p = patch(model, verify=False)
    assert any(isinstance(m, Patched) for m in model.modules())
    p.undo()
    assert inside(model) == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "deepseek_v2", "deepseek_v3", "mixtral"])
def test_process_is_untouched(name: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, other = build(name), build(name)
    modules = {type(m).__module__ for m in model.modules() if "transformers" in type(m).__module__}
    classes = {type(m) for m in model.modules() if "transformers" in type(m).__module__}

    def snapshot() -> list[dict[str, Any]]:
        files = [dict(vars(sys.modules[module])) for module in sorted(modules)]
        bodies = [dict(vars(cls)) for cls in sorted(classes, key=str)]
        registries = [dict(registry.items()) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
        return files + bodies + registries

    logits(model)  # transformers caches things of its own on a first call
    before, untouched = snapshot(), inside(other)
    patch(model)
    logits(model)
    assert snapshot() == before
    assert inside(other) == untouched


def test_probing_leaves_random_state_and_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch = nn.BatchNorm1d(8)
            self.norm = nn.LayerNorm(8)

    model = Net().train()
    state, running = torch.get_rng_state(), model.batch.running_mean.clone()
    report = patch(model, verify=False).report()
    assert report.counts() == {"norm": 1}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.batch.running_mean, running)
    assert model.batch.num_batches_tracked == 0


def test_state_dict_and_names_are_unchanged() -> None:
    model = build("llama")
    before, shown = model.state_dict(), repr(model)
    patch(model, verify=False)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key].data_ptr() == before[key].data_ptr() for key in before)
    assert repr(model) == shown


def test_a_copy_stays_patched_and_has_its_own_weights() -> None:
    model = build("llama")
    p = patch(model, verify=False)
    expected = logits(model)
    twin = copy.deepcopy(model)
    p.undo()
    assert sum(isinstance(m, Patched) for m in twin.modules()) == 11
    assert not any(isinstance(m, Patched) for m in model.modules())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin), expected)


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v2"])
def test_pickle_round_trip_stays_patched(name: str) -> None:
    model = build(name)
    patch(model, verify=False)
    again = pickle.loads(pickle.dumps(model))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(logits(again), logits(model))


def test_context_manager_undoes() -> None:
    model = build("llama")
    before = inside(model)
    with patch(model, verify=False):
        assert inside(model) != before
    assert inside(model) == before


def test_context_manager_after_explicit_undo() -> None:
    with patch(build("llama"), verify=False) as p:
        p.undo()


def test_patching_twice_is_refused() -> None:
    model = build("llama")
    p = patch(model, verify=False)
    with pytest.raises(PatchError, match=r"already patched \(model.layers.0\)"):
        patch(model, verify=False)
    p.undo()
    patch(model, verify=False)


def test_undoing_twice_is_refused() -> None:
    p = patch(build("llama"), verify=False)
    p.undo()
    with pytest.raises(PatchError, match="already undone"):
        p.undo()
    with pytest.raises(PatchError, match="was undone"):
        p.verify(tokens())


def test_class_changed_after_patching_is_noticed() -> None:
    model = build("llama")
    p = patch(model, verify=False)
    norm = model.model.norm
    norm.__class__ = type("Sharded", (type(norm),), {})
    with pytest.raises(PatchError, match="Sharded was changed again"):
        p.undo()


def test_nothing_to_replace() -> None:
    with pytest.raises(PatchError, match="nothing in Sequential can be replaced"):
        patch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), verify=False)
    model = build("mixtral")
    before = inside(model)
    with pytest.raises(PatchError, match="ops.fused_moe is not in ops="):
        patch(model, verify=False, ops=["mlp"])
    assert inside(model) == before


def test_model_without_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(PatchError, match=r"0.weight is on the meta device: load the weights"):
        patch(model, verify=False)


def test_wrong_arguments() -> None:
    model = build("llama")
    with pytest.raises(InputError, match="mode='eval'; allowed: 'inference', 'train'"):
        patch(model, mode="eval")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ops has rmsnorm; allowed: kinds norm, mlp"):
        patch(model, ops=["rmsnorm"])
    assert not any(isinstance(m, Patched) for m in model.modules())


def test_every_patchable_kind_is_listed_with_its_ops() -> None:
    assert set(OPS_OF_KIND) == set(get_args(Patchable))
    for op in (op for ops in OPS_OF_KIND.values() for op in ops):
        assert contract(op).name == op
