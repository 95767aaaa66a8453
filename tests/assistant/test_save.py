"""What was kept can be put on another copy of the model: by three lines of code, or by a folder."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from tests.harness.simulated_time import simulate_time
from torch import nn

from tilewright.assistant import apply_changes, optimize, save
from tilewright.assistant.timing.decide import Noise
from tilewright.assistant.timing.measure import Comparison, Metric
from tilewright.errors import InputError


@pytest.fixture
def optimised(monkeypatch):
    """A model and its report as if merged_qkv had been kept: whether it is faster is not the question here."""
    simulate_time(monkeypatch)
    gain = Metric("request", "ms", 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    monkeypatch.setattr("tilewright.assistant.trial.compare", lambda *_, **__: Comparison([gain], 6, 1.0))
    monkeypatch.setattr("tilewright.assistant.trial.decide", lambda *_, **__: ("kept", "planted"))
    monkeypatch.setattr("tilewright.assistant.trial.Noise.of", lambda control: Noise())
    model = tiny_llama()
    return optimize(model, prompts=prompts(), allow=["merged_qkv"], new_tokens=2, ceilings=ceilings(), budget_s=1e4)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(prompts()[0][None]).logits


def test_the_headline_names_gain_accuracy_and_what_was_kept(optimised):
    assert "2.00x (95 %: 2.00 to 2.00) by merged_qkv; logit error" in optimised.report.headline


def test_the_reports_code_applies_what_was_kept(optimised):
    code = optimised.report.code
    assert len(code.splitlines()) == 3
    assert code.splitlines()[-1] == "apply_changes(model, ['merged_qkv'])"
    model = tiny_llama()
    expected = logits(model)
    stack = apply_changes(model, ["merged_qkv"])
    assert torch.equal(logits(model), logits(optimised.model))
    stack.at(0)
    assert torch.equal(logits(model), expected)


def test_a_saved_folder_loads_with_what_was_kept(optimised, tmp_path, monkeypatch):
    expected = logits(optimised.model)
    files = save(optimised, tmp_path)
    assert {"config.json", "model.safetensors", "optimized.py"} <= set(files)
    assert len(optimised._stack) == 1, "the changes are in force again"
    loaded = _load(tmp_path, monkeypatch)
    assert torch.equal(logits(loaded), expected)
    assert hasattr(loaded.model.layers[0].self_attn.q_proj, "tilewright_group")


def test_a_module_of_a_factory_is_saved_with_its_weights(optimised, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from tests.assistant.planted import prompts, tiny_llama\n"
        "def make():\n    model = tiny_llama()\n    model.lm_head.weight.data.zero_()\n"
        "    return model, prompts()[0][None]\n"
    )
    expected = logits(optimised.model)
    files = save(optimised, tmp_path / "out", source=f"{tmp_path / 'own.py'}:make")
    assert files == ["optimized.py", "weights.pt"]
    assert torch.equal(logits(_load(tmp_path / "out", monkeypatch)), expected)


def test_a_change_that_does_not_exist_or_apply_leaves_the_model(monkeypatch):
    model = tiny_llama()
    with pytest.raises(InputError, match="turbo"):
        apply_changes(model, ["turbo"])
    plain = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(Exception, match="generate|decoder"):
        apply_changes(plain, ["static_decode"], torch.randn(2, 4))


def _load(folder: Path, monkeypatch) -> nn.Module:
    spec = importlib.util.spec_from_file_location("optimized", folder / "optimized.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "optimized", module)
    spec.loader.exec_module(module)
    return module.load("cpu")
