"""`generate`: text from the command line."""

import json

import pytest
from tests.assistant.planted import tiny_llama

pytest.importorskip("transformers")


@pytest.fixture
def folder(place):
    """A model folder whose tokenizer knows words "w0", "w1", ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny_llama()
    words = {f"w{n}": n for n in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(place / "model")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}w1 {{ message['content'] }}{% endfor %}"
    fast.save_pretrained(place / "model")
    return "model"


def test_text_comes_and_json_says_what_it_was(tilewright, place, folder):
    words = ("--prompt", "w3 w4 w5", "--max-tokens", "6", "--device", "cpu", "--baseline")
    done = tilewright("generate", folder, *words, "--json", "out.json")
    assert done.exit_code == 0, done.stderr
    report = json.loads((place / "out.json").read_text())
    assert report["output"]["prompt"] == 3
    assert report["output"]["tokens"] == report["baseline"]["tokens"]
    assert done.stdout.split() == report["output"]["text"].split() == [f"w{n}" for n in report["output"]["tokens"]]
    assert "the unchanged model" in done.stderr


def test_a_chat_template_is_applied(tilewright, folder):
    done = tilewright(
        "generate", folder, "--chat", "--prompt", "w3", "--max-tokens", "2", "--device", "cpu", "--json", "-"
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == 2


def test_a_draft_model_changes_no_token_and_its_share_is_told(tilewright, place, folder):
    words = ("--prompt", "w3 w4 w5", "--max-tokens", "8", "--device", "cpu", "--draft-model", folder)
    done = tilewright("generate", folder, *words, "--num-draft-tokens", "2", "--baseline", "--json", "out.json")
    assert done.exit_code == 0, done.stderr
    report = json.loads((place / "out.json").read_text())
    assert report["output"]["tokens"] == report["baseline"]["tokens"]
    assert report["accepted_tokens"] == report["draft_tokens"] == 4
    assert "4 of 4 drafted tokens accepted" in done.stderr


def test_a_draft_with_another_tokenizer_is_refused(tilewright, place, folder):
    (place / "other").mkdir()
    for file in (place / folder).iterdir():
        text = file.read_bytes()
        (place / "other" / file.name).write_bytes(text.replace(b'"w5"', b'"v5"') if file.suffix == ".json" else text)
    done = tilewright("generate", folder, "--prompt", "w3", "--device", "cpu", "--draft-model", "other")
    assert done.exit_code == 2
    assert "draft_model has a tokenizer with another vocabulary" in done.stderr


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "w3", "--fp8"), "--fp8 needs a GPU"),
        (("--prompt", "w3", "--quantize", "int3"), "--quantize is 'int3'; allowed are"),
        (("--prompt", "w3", "--quantize", "int4"), "below 512 a layer stays"),
        (("--prompt", "w3", "--max-tokens", "0"), "max-tokens"),
        (("--prompt", "w3", "--max-tokens", "100000"), "new ones exceed the"),
    ],
)
def test_what_cannot_be_done_is_one_line(tilewright, folder, words, match):
    done = tilewright("generate", folder, *words, "--device", "cpu")
    assert done.exit_code == 2
    assert match in done.stderr


def test_a_model_without_a_tokenizer_is_refused(tilewright, place):
    tiny_llama().save_pretrained(place / "bare")
    done = tilewright("generate", "bare", "--prompt", "w3", "--device", "cpu")
    assert done.exit_code == 2
    assert "has no tokenizer" in done.stderr
