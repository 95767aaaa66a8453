"""`analyze`, `optimize`: the assistant from the command line."""

import json

import pytest
from tests.assistant.planted import tiny_llama

pytest.importorskip("transformers")


@pytest.mark.usefixtures("calibrated")
def test_analyze_prints_only_json_on_stdout(tilewright, factory):
    done = tilewright("analyze", factory, "--new-tokens", "2", "--device", "cpu", "--json", "-")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["kind"], report["goal"], report["model"]["class"]) == ("analyze", "latency", "LlamaForCausalLM")
    assert report["workload"]["new_tokens"] == 2
    assert "loading my model" in done.stderr


@pytest.mark.usefixtures("calibrated")
def test_optimize_writes_json_and_page(tilewright, place, factory):
    pytest.importorskip("matplotlib")
    words = ("--new-tokens", "2", "--allow", "merged_qkv", "--budget", "1", "--device", "cpu")
    done = tilewright("optimize", factory, *words, "--json", "out/report.json", "--html", "out/report.html")
    assert done.exit_code == 0, done.stderr
    report = json.loads((place / "out/report.json").read_text())
    assert report["kind"] == "optimize"
    assert [change["name"] for change in report["changes"]] == ["merged_qkv"]
    assert (place / "out/report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert "report.html" in done.stdout


@pytest.mark.usefixtures("calibrated")
def test_a_model_folder_needs_no_prompts(tilewright, place):
    tiny_llama().save_pretrained(place / "model")
    done = tilewright("analyze", "model", "--new-tokens", "2", "--device", "cpu", "--json", "-")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"]["class"] == "LlamaForCausalLM"
    assert "random tokens were used" in report["notes"][0]


@pytest.mark.usefixtures("calibrated")
def test_save_writes_a_folder_that_loads(tilewright, place):
    tiny_llama().save_pretrained(place / "model")
    words = ("--new-tokens", "2", "--allow", "merged_qkv", "--budget", "1", "--device", "cpu")
    done = tilewright("optimize", "model", *words, "--save", "fast")
    assert done.exit_code == 0, done.stderr
    assert {"config.json", "model.safetensors", "optimized.py"} <= {file.name for file in (place / "fast").iterdir()}
    assert "optimized.py" in done.stdout
