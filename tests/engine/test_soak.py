"""`scripts/soak.py` with the trained model for two seconds: nothing lost, mixed or kept; and it tells what is."""

import importlib.util
import os
import random
import runpy
from pathlib import Path

import pytest
from tests.serve.running import Running

from tilewright import Engine

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("tilewright_soak", ROOT / "scripts" / "soak.py")
soak_script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak_script)


@pytest.fixture(scope="module")
def running():
    from transformers import AutoTokenizer

    model, _ = runpy.run_path(str(ROOT / "examples/stdlib_lm/factory.py"))["factory"]()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/stdlib_lm/model")
    running = Running(Engine(model, tokenizer, max_batch=4, max_context=128, cache_tokens=256))
    yield running
    running.close()


def test_a_server_under_clients_of_all_kinds(running, monkeypatch):
    monkeypatch.setattr(soak_script, "KINDS", dict.fromkeys(soak_script.KINDS, 1))
    prompts = [("import sys\n", 6), ("import sys\nimport os\n", 3), ("def main(", 8)]
    soak = soak_script.Soak(running.port, os.getpid(), prompts, 128)
    report = soak.run(1.5, 4)
    summary = report.summary()
    assert report.is_right, summary
    assert min(summary["sent"][kind] for kind in ("whole", "stream", "leave", "malformed", "hostile")) > 0
    assert summary["seconds"]["whole"]["count"] == summary["sent"]["whole"]
    assert set(summary["held_at_the_end"]) == {"running", "waiting", "pages_held"}

    soak.alone[0] += "x"
    soak._ask_whole(0, random.Random(0))
    soak._ask_stream(0, random.Random(0))
    soak._expect(404, b"{")
    assert (len(report.mixed), len(report.wrong), report.is_right) == (2, 1, False)


def test_an_answer_that_does_not_come_is_lost():
    soak = soak_script.Soak(1, os.getpid(), [("x", 1)], 8)
    soak._end = float("inf")
    soak._ask_whole = lambda index, draw: setattr(soak, "_end", 0) or soak._whole(index)
    soak._client(0)
    assert len(soak.report.lost) == sum(soak.report.sent.values()) > 0
