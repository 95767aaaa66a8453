"""What a user names is opened, or refused in one readable line."""

import pytest
import torch
from tests.assistant.planted import tiny_llama

from tilewright.assistant.load import load, load_prompts
from tilewright.errors import UsageError

FACTORY = """
import torch
from dataclasses import dataclass

@dataclass
class Width:
    n: int = 3

def make():
    return torch.nn.Linear(Width().n, 2), torch.ones(1, 3)

def wrong():
    return 3

def broken():
    raise ValueError("first line" + chr(10) + "second line")
"""


@pytest.fixture
def factory(tmp_path):
    file = tmp_path / "planted_factory.py"
    file.write_text(FACTORY)
    return file


def test_a_factory_gives_module_and_inputs(factory):
    found = load(f"{factory}:make", device="cpu")
    assert isinstance(found.model, torch.nn.Linear)
    assert not found.model.training
    assert found.inputs.shape == (1, 3)


def test_a_folder_is_opened_in_the_dtype_of_its_weights(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    found = load(str(tmp_path), device="cpu")
    assert next(found.model.parameters()).dtype == torch.bfloat16
    assert found.tokenizer is None
    assert not found.model.training


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/folder", "does not exist"),
        (".", "no config.json"),
        ("missing.py:make", "no file"),
        ("{factory}:absent", "no function 'absent'"),
        ("{factory}:wrong", "returned int"),
        ("{factory}:broken", "ValueError: first line"),
    ],
)
def test_wrong_names_are_one_readable_line(name, said, factory, monkeypatch):
    monkeypatch.chdir(factory.parent)
    with pytest.raises(UsageError, match=said) as caught:
        load(name.format(factory=factory), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_broken_folder_is_one_readable_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="cannot be opened") as caught:
        load(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_refused(tmp_path):
    with pytest.raises(UsageError, match="toaster"):
        load(str(tmp_path), device="toaster")


def test_prompts_from_text_and_json_lines(tmp_path):
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("first\nstill first\n\n\nsecond\n")
    lines.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert load_prompts(text) == ["first\nstill first", "second"]
    assert load_prompts(lines) == ["one", "two"]


@pytest.mark.parametrize("content", ['{"prompt": "x"}', "not json", "[1]"])
def test_wrong_prompt_lines_are_named(tmp_path, content):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "one"}\n' + content)
    with pytest.raises(UsageError, match="line 2"):
        load_prompts(file)


def test_missing_and_empty_prompts_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UsageError, match="no prompt"):
        load_prompts(tmp_path / "empty.txt")
