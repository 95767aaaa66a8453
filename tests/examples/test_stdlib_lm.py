"""The embedded model: its data split, its measurement, a short training run, and the files that are committed.

The last section reads `examples/stdlib_lm/model` and fails when a file is missing: what is promised is committed.
"""

import hashlib
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.harness.simulated_time import SimulatedTime
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib_lm"
MODEL = EXAMPLE / "model"
sys.path.insert(0, str(EXAMPLE))
data = importlib.import_module("data")
measure = importlib.import_module("measure")
bpe = importlib.import_module("tokenizer")
results = importlib.import_module("results")
training = importlib.import_module("train")
weights = importlib.import_module("weights")
sys.path.remove(str(EXAMPLE))

MAX_WEIGHT_BYTES = 4_000_000
MAX_FOLDER_BYTES = 4_000_000
MAX_PROMPT_BYTES = 100_000
MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "texts.tar.xz",
    "tokenizer_config.json",
    "training.json",
    "weights.packed",
]

UNPACKED = (weights.UNPACKED, *weights.TEXTS)


# ------------------------------------------------------------------------------------------------------------ the split


@pytest.mark.parametrize(
    ("first_byte", "part"),
    [
        ("00", "held_out"),
        ("0c", "held_out"),
        ("0d", "validation"),
        ("19", "validation"),
        ("1a", "train"),
        ("ff", "train"),
    ],
)
def test_first_byte_of_the_hash_decides(first_byte, part):
    assert data.part_of(first_byte + "a7" * 31) == part


def test_parts_have_their_shares():
    counts = dict.fromkeys(data.PARTS, 0)
    for i in range(20_000):
        counts[data.part_of(hashlib.sha256(str(i).encode()).hexdigest())] += 1
    assert counts["held_out"] / 20_000 == pytest.approx(13 / 256, abs=0.006)  # 4 standard deviations
    assert counts["validation"] / 20_000 == pytest.approx(13 / 256, abs=0.006)


def _module(part: str, index: int) -> str:
    """A module of about 2 KB whose hash puts it in `part`."""
    body = "\n".join(
        f"def value_{i}(left, right):\n    total = left + right * {index + i}\n    return total\n" for i in range(26)
    )
    for attempt in range(100_000):
        text = f"# module {index}, attempt {attempt}\n{body}"
        if data.part_of(hashlib.sha256(text.encode()).hexdigest()) == part:
            return text
    raise AssertionError(f"no text for {part}")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A tree of 40 training, 4 validation and 4 held-out modules."""
    root = tmp_path_factory.mktemp("library")
    for part, count in (("train", 40), ("validation", 4), ("held_out", 4)):
        (root / part).mkdir()
        for index in range(count):
            (root / part / f"m{index}.py").write_text(_module(part, index))
    return root


def test_split_follows_contents_not_names(library, tmp_path):
    parts = data.split(data.collect(library))
    assert {part: {Path(file.path).parts[0] for file in files} for part, files in parts.items()} == {
        part: {part} for part in data.PARTS
    }
    for number, file in enumerate(file for files in parts.values() for file in files):
        (tmp_path / f"renamed_{number}.py").write_text(file.text)
    renamed = data.split(data.collect(tmp_path))
    for part in data.PARTS:
        assert {file.sha256 for file in renamed[part]} == {file.sha256 for file in parts[part]}


def test_split_of_the_real_library_is_disjoint():
    files = data.collect(data.stdlib_root())
    parts = data.split(files)
    hashes = [{file.sha256 for file in parts[part]} for part in data.PARTS]
    assert sum(map(len, hashes)) == len(files) == len(set.union(*hashes))
    assert data.byte_count(parts["train"]) > 2_000_000
    assert not any(data.EXCLUDED_FOLDERS.intersection(Path(file.path).parts) for file in files)


def test_collect_leaves_out_what_is_no_source(tmp_path):
    for folder in ("test", "pkg/tests", "idlelib/idle_test", "site-packages/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(f"folder = {folder!r}\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "table.py").write_text("T = {\n" + "".join(f"    'k{i}': {i},\n" for i in range(50)) + "}\n")
    (tmp_path / "broken.py").write_bytes(b"name = '\xff'\n")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\r\nname = 'é'\r\n".encode("latin-1"))
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text("x = 1\n")
    files = data.collect(tmp_path)
    assert [file.path for file in files] == ["latin.py", "one.py"]
    assert files[0].text == "# coding: latin-1\nname = 'é'\n"
    assert files[0].sha256 == hashlib.sha256((tmp_path / "latin.py").read_bytes()).hexdigest()


def test_a_corpus_without_a_part_is_refused(tmp_path):
    (tmp_path / "only.py").write_text(_module("train", 0))
    with pytest.raises(ValueError, match="no file for validation, held_out"):
        data.split(data.collect(tmp_path))


def test_prompts_are_whole_lines_of_allowed_files():
    own = data.SourceFile("own.py", "00" * 32, _module("held_out", 0))
    other = data.SourceFile("other.py", "01" * 32, "# Copyright (c) 1999 Somebody Else\n" + _module("held_out", 1))
    psf = data.SourceFile(
        "psf.py", "02" * 32, "# Copyright 2001 Python Software Foundation.\n" + _module("held_out", 2)
    )
    chosen = data.prompts([own, other, psf], count=5, shortest=300, longest=500)
    assert chosen == data.prompts([psf, other, own], count=5, shortest=300, longest=500)
    assert len(chosen) == 5
    assert {prompt["file"] for prompt in chosen} == {"own.py", "psf.py"}
    texts = {file.path: file.text for file in (own, psf)}
    for prompt in chosen:
        assert 300 <= len(prompt["text"].encode()) <= 500
        before, found, _ = texts[prompt["file"]].partition(prompt["text"])
        assert found
        assert before == "" or before.endswith("\n")


# -------------------------------------------------------------------------------------------- tokenizer and measurement


def test_tokenizer_round_trips_any_text(library):
    files = data.split(data.collect(library))["train"]
    tokenizer = bpe.train_tokenizer(files)
    text = "def f(x):\n\treturn  'naïve → 🐍'\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    stream = bpe.encode(tokenizer, files[:2])
    assert (stream == bpe.END_ID).nonzero().flatten().tolist() == [0, len(tokenizer.encode(files[0].text).ids) + 1]


class _Uniform(nn.Module):
    """Gives every one of 7 tokens the same probability and counts what it was asked."""

    asked = 0

    def forward(self, input_ids, use_cache):
        self.asked += input_ids.numel()
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 7))


@pytest.mark.parametrize("tokens", [2, 10, 41, 45], ids=["one", "partial only", "whole windows", "both"])
def test_perplexity_of_a_uniform_model_is_its_vocabulary(tokens):
    model = _Uniform()
    found = measure.perplexity(model, torch.arange(tokens) % 7, text_bytes=100, context=10, batch=3)
    assert model.asked == found.tokens == tokens - 1
    assert found.perplexity == pytest.approx(7)
    assert found.bits_per_byte == pytest.approx((tokens - 1) * math.log2(7) / 100)
    assert model.training


def test_perplexity_is_of_the_next_token():
    class Successor(nn.Module):
        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=50.0 * nn.functional.one_hot((input_ids + 1) % 7, 7).float())

    right = measure.perplexity(Successor(), torch.arange(30) % 7, text_bytes=1, context=8, batch=2)
    wrong = measure.perplexity(Successor(), torch.zeros(30, dtype=torch.int64), text_bytes=1, context=8, batch=2)
    assert right.perplexity == pytest.approx(1)
    assert wrong.nats_per_token == pytest.approx(50)


# ------------------------------------------------------------------------------------------------------------- training


def test_learning_rate_rises_then_falls():
    rates = [training.learning_rate(step / 100, 1.0) for step in range(101)]
    assert max(rates) == rates[3] == 1.0
    assert rates[:4] == sorted(rates[:4])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[100] == pytest.approx(0.01)


def test_noise_touches_inputs_only():
    stream = torch.arange(500)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = training.crops(stream, training.Recipe(batch=8, context=100, noise=0.0), generator)
    assert torch.equal(inputs + 1, targets)
    inputs, targets = training.crops(stream, training.Recipe(batch=8, context=100, noise=0.5), generator)
    assert torch.equal(targets[:, :-1] + 1, targets[:, 1:])
    assert 0.4 < (inputs + 1 != targets).float().mean() < 0.6


def _train(stream, recipe, seconds):
    torch.manual_seed(training.SEED)
    return training.train(
        training.build_model(recipe.context),
        stream,
        lambda candidate: measure.perplexity(candidate, stream[:50], text_bytes=50, context=16, batch=2),
        recipe,
        seconds,
    )


def test_training_ends_in_its_time(monkeypatch):
    monkeypatch.setattr(training, "time", SimulatedTime())  # a reading a step
    stream = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(1))
    done = _train(stream, training.Recipe(batch=2, context=16, epochs=1e6), seconds=0.02)
    assert done.best_step > 0
    assert 5 <= done.steps <= 20
    assert 0.02 <= done.seconds < 0.025


def test_training_repeats_exactly_when_epochs_end_it():
    stream = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(1))
    recipe = training.Recipe(batch=2, context=16, epochs=0.25)  # 4 steps

    first, second = _train(stream, recipe, seconds=600), _train(stream, recipe, seconds=600)
    assert first.steps == second.steps == 4
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    """A run of a few dozen steps on the small tree: its folder and its summary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("model")
    recipe = training.Recipe(minutes=2, epochs=0.4, batch=4, context=64, average=0.8)
    summary = training.run(recipe, library, out)
    torch.set_num_threads(threads)
    return out, summary


def test_run_learns_and_writes_everything(trained):
    out, summary = trained
    assert sorted(path.name for path in out.iterdir()) == sorted([*MODEL_FILES, *UNPACKED])
    assert json.loads((out / "training.json").read_text()) == summary
    assert summary["held_out_fp32"]["perplexity"] < 20  # of a vocabulary of several hundred
    assert summary["held_out_bf16"]["perplexity"] == pytest.approx(summary["held_out_fp32"]["perplexity"], rel=0.05)
    assert summary["prompts_saved"]["perplexity"] == pytest.approx(summary["prompts_bf16"]["perplexity"], rel=0.05)
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    validation = [entry["validation_loss"] for entry in log if "validation_loss" in entry]
    assert min(validation) == pytest.approx(summary["validation_fp32"]["nats_per_token"], abs=1e-5)
    _check_no_leak(out)


def test_saved_folder_generates(trained):
    _check_generates(trained[0])


# ------------------------------------------------------------------------------------------------------ committed files


def _prompts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def _check_no_leak(folder: Path) -> None:
    trained_on = {line.split()[0] for line in (folder / "train_files.sha256").read_text().splitlines()}
    assert {data.part_of(sha256) for sha256 in trained_on} == {"train"}
    prompted = {prompt["sha256"] for prompt in _prompts(folder)}
    assert {data.part_of(sha256) for sha256 in prompted} == {"held_out"}
    assert not trained_on & prompted


def _check_generates(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    prompt = tokenizer(_prompts(folder)[0]["text"][:80], return_tensors="pt").input_ids
    assert tokenizer.decode(prompt[0]) == _prompts(folder)[0]["text"][:80]
    new = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, min_new_tokens=8)
    assert new.shape == (1, prompt.shape[1] + 8)


def _committed(folder: Path) -> list[Path]:
    """The files of a folder without what is unpacked into it."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(UNPACKED))


def test_committed_files_are_complete_and_small():
    assert [path.name for path in _committed(MODEL)] == MODEL_FILES
    assert (MODEL / "weights.packed").stat().st_size <= MAX_WEIGHT_BYTES
    assert (weights.unpack() / "prompts.jsonl").stat().st_size <= MAX_PROMPT_BYTES
    assert sum(path.stat().st_size for path in _committed(EXAMPLE) + _committed(MODEL)) < MAX_FOLDER_BYTES


def test_committed_prompts_come_from_held_out_files_only():
    _check_no_leak(weights.unpack())
    assert len(_prompts(MODEL)) == training.PROMPTS["count"]
    assert "Python Software Foundation. All Rights Reserved" in (EXAMPLE / "LICENSE-PSF").read_text()


def test_committed_weights_are_short_and_as_good_as_the_summary_says():
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights.unpack(), dtype="auto")
    assert all(torch.equal(weights.shortened(parameter.data), parameter.data) for parameter in model.parameters())
    texts = [prompt["text"] for prompt in _prompts(MODEL)]
    found = training.of_texts(model, Tokenizer.from_file(str(MODEL / "tokenizer.json")), texts)
    stated = json.loads((MODEL / "training.json").read_text())["prompts_saved"]
    assert found.tokens == stated["tokens"]
    assert found.perplexity == pytest.approx(stated["perplexity"], rel=0.005)  # bf16 products of another machine


def test_committed_summary_fits_the_committed_files():
    summary = json.loads((MODEL / "training.json").read_text())
    config = json.loads((MODEL / "config.json").read_text())
    assert summary["data"]["train"]["files"] == len((weights.unpack() / "train_files.sha256").read_text().splitlines())
    assert config["max_position_embeddings"] == summary["recipe"]["context"]
    assert (weights.unpack() / "model.safetensors").stat().st_size == pytest.approx(2 * summary["parameters"], rel=0.01)
    assert summary["held_out_fp32"]["perplexity"] < 40
    assert summary["held_out_bf16"]["perplexity"] == pytest.approx(summary["held_out_fp32"]["perplexity"], rel=0.01)
    assert summary["prompts_saved"]["perplexity"] == pytest.approx(summary["prompts_bf16"]["perplexity"], rel=0.01)
    readme = (EXAMPLE / "README.md").read_text()
    assert readme == results.filled(readme, summary), "run: python examples/stdlib_lm/results.py"


def test_committed_model_generates():
    _check_generates(weights.unpack())


def test_factory_gives_a_model_and_an_input_it_accepts():
    module, inputs = importlib.import_module("examples.stdlib_lm.factory").factory()
    with torch.inference_mode():
        logits = module(**inputs).logits
    assert logits.shape == (*inputs["input_ids"].shape, bpe.VOCAB_SIZE)
    loss = nn.functional.cross_entropy(logits[0, :-1], inputs["input_ids"][0, 1:])
    assert loss < math.log(bpe.VOCAB_SIZE) / 2  # it has learnt: a uniform guess costs ln V
