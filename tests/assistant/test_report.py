"""One schema, three faces: JSON that is read back strictly, a page that stands alone, tables for a terminal."""

import io
import json
import math
import re

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama

from tilewright.assistant import Report, analyze
from tilewright.assistant.measure import Comparison, Metric
from tilewright.assistant.report import ChangeRecord
from tilewright.assistant.verify import Accuracy
from tilewright.errors import InputError

GAIN = Metric("request", "ms", 123.4, 120.0, 126.0, 61.7, 60.0, 63.0, 2.013, 1.987, 2.043)


@pytest.fixture(scope="module")
def report():
    torch.set_num_threads(1)
    found = analyze(tiny_llama(), prompts=prompts(), new_tokens=4, ceilings=ceilings())
    accuracy = Accuracy(100, 4.321e-7, 4.4e-7, 9.5e-7, 0.991, 0.99, 0.95)
    failed = Accuracy(100, math.inf, 4.4e-7, 9.5e-7, 0.1, 0.99, 0.95, failures=["logit error inf exceeds 9.5e-07"])
    kept = ChangeRecord("merged_qkv", "why", "source", "rounding", "kept", "faster <beyond> its interval.", "3 merged")
    kept.measured, kept.accuracy, kept.preparation_s = Comparison([GAIN], 12, 3.4), accuracy, 0.5
    wrong = ChangeRecord("bf16", "why", "source", "precision", "rejected", "the accuracy gate.", accuracy=failed)
    found.kind, found.totals, found.accuracy, found.after = (
        "optimize",
        Comparison([GAIN], 20, 5.0),
        accuracy,
        found.before,
    )
    found.changes += [kept, wrong]
    return found


def test_json_round_trip(report):
    text = report.to_json()
    again = Report.from_json(text)
    assert again.to_json() == text
    assert again.changes[0].reason == report.changes[0].reason
    assert again.totals.decisive.gain == pytest.approx(report.totals.decisive.gain, rel=1e-5)
    assert json.loads(text)["schema"] == "tilewright.optimize/1"
    assert "Infinity" not in text
    assert "NaN" not in text


@pytest.mark.parametrize("text", ['{"schema": "tilewright.optimize/2"}', "{}", "[]"])
def test_another_schema_is_refused(text):
    with pytest.raises(InputError, match="schema"):
        Report.from_json(text)


def test_html_holds_the_numbers_and_needs_nothing_else(report, tmp_path):
    page = report.save(tmp_path / "report.html").read_text()
    assert "2.01x" in page
    assert "1.99 to 2.04" in page
    assert "123.4" in page
    assert "4.32e-07" in page
    assert "merged_qkv" in page
    assert "the accuracy gate." in page
    assert "faster &lt;beyond&gt; its interval." in page
    assert page.count("<svg") == 4
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_report_is_saved_as_html_or_json(report, tmp_path):
    assert Report.from_json(report.save(tmp_path / "report.json").read_text()).to_json() == report.to_json()
    with pytest.raises(InputError, match=r"\.html or \.json"):
        report.save(tmp_path / "report.txt")


def test_terminal_shows_decisions_and_intervals(report):
    from rich.console import Console

    from tilewright.assistant.terminal import show

    console = Console(width=200, record=True, file=io.StringIO())
    show(report, console)
    text = console.export_text()
    assert "merged_qkv" in text
    assert "kept" in text
    assert "2.013x (1.987 to 2.043)" in text
    assert "2.01x (1.99 to 2.04)" in text


def test_progress_prints_lines_when_there_is_no_terminal(capsys):
    from rich.console import Console

    from tilewright.assistant.terminal import progress

    with progress(Console(force_terminal=False)) as say:
        say("merged_qkv: [timing]")
    assert "merged_qkv: [timing]" in capsys.readouterr().out
