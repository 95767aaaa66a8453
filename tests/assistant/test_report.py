"""One schema, three faces: JSON that is read back strictly, a page that stands alone, tables for a terminal."""

import dataclasses
import io
import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama

from tilewright.assistant import Report, analyze
from tilewright.assistant.document import ChangeRecord
from tilewright.assistant.predict import Roof
from tilewright.assistant.timing.measure import Comparison, Metric
from tilewright.assistant.verify import Accuracy
from tilewright.assistant.view import html, plots
from tilewright.assistant.view.labels import Box, box_of
from tilewright.bench.commit import commit
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


def test_a_report_names_the_commit_it_was_measured_at(report, tmp_path):
    assert report.commit == commit()
    dated = dataclasses.replace(report, commit="0123456789ab")
    assert json.loads(dated.to_json())["commit"] == "0123456789ab"
    assert "Measured at commit 0123456789ab." in dated.save(tmp_path / "report.html").read_text()


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

    from tilewright.assistant.view.terminal import show

    console = Console(width=200, record=True, file=io.StringIO())
    show(report, console)
    text = console.export_text()
    assert "merged_qkv" in text
    assert "kept" in text
    assert "2.013x (1.987 to 2.043)" in text
    assert "2.01x (1.99 to 2.04)" in text


def test_progress_prints_lines_when_there_is_no_terminal(capsys):
    from rich.console import Console

    from tilewright.assistant.view.terminal import progress

    with progress(Console(force_terminal=False)) as say:
        say("merged_qkv: [timing]")
    assert "merged_qkv: [timing]" in capsys.readouterr().out


NOISY = """
import os, subprocess, sys
from rich.console import Console
from tilewright.assistant.view.terminal import progress

with progress(Console(stderr=True, force_terminal=len(sys.argv) > 2)) as say:
    say("step 3 of 9, compiled_decode: first calls")
    os.write(1, b"profiler_start\\n")
    os.write(2, b"USDT: profiler_start\\n")
    subprocess.run(["sh", "-c", "echo g++: note; echo g++: warning >&2"])
    print("a warning of Python", file=sys.stderr)
    if sys.argv[1] == "fail":
        raise SystemExit("failed")
print("the result")
"""


def _run_noisy(*arguments):
    return subprocess.run([sys.executable, "-c", NOISY, *arguments], capture_output=True, text=True, check=False)


def test_compiler_noise_is_kept_from_the_progress_lines():
    done = _run_noisy("end")
    assert done.stdout == "the result\n"
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r" +\d+\.\d s  step 3 of 9, compiled_decode: first calls", first)
    assert second == "a warning of Python"


def test_compiler_noise_does_not_break_the_live_line():
    done = _run_noisy("end", "terminal")
    assert done.stdout == "the result\n"
    assert "step 3 of 9" in done.stderr
    assert "0:00:0" in done.stderr  # elapsed
    assert "a warning of Python" in done.stderr
    assert "USDT" not in done.stderr
    assert "g++" not in done.stderr


def test_compiler_noise_is_shown_when_a_run_fails():
    done = _run_noisy("fail")
    assert done.returncode == 1
    assert done.stdout == ""
    assert {"USDT: profiler_start", "g++: note", "g++: warning"} <= set(done.stderr.splitlines())


def _texts(svg: str) -> list[tuple[str, float, Box]]:
    """Text, font size and box of every text of a plot, y upwards."""
    found = []
    for style, x, y, text in re.findall(r'<text style="([^"]*)" x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)</text>', svg):
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        found.append((text, size, box_of(float(x), -float(y), text, size)))
    return found


def _crowded():
    """Two phases with eight classes each, most of them at nearly the same place: a model of launch-sized modules."""
    classes = ["LlamaAttention", "Linear", "LlamaModel", "Embedding", "LlamaRMSNorm", "LlamaDecoderLayer", "LlamaMLP"]
    return [
        Roof(phase, name, 5, 10.0 + (0.3 + scale) * place, 4.0 + 0.2 * place, 10_000 + 50 * place, 9_000)
        for scale, phase in ((0.1, "prefill"), (0.2, "decode"))
        for place, name in enumerate([*classes, "LlamaRotaryEmbedding"])
    ]


@pytest.mark.parametrize("crowded", [False, True])
def test_labels_of_the_roofline_do_not_overlap(report, crowded):
    drawn = dataclasses.replace(report, roofs=_crowded() if crowded else report.roofs)
    labels = [(text, box) for text, size, box in _texts(plots.roofline(drawn)) if size == 6.5]
    assert {text for text, _ in labels} >= {roof.module_class for roof in drawn.roofs if roof.floor_us and roof.us}
    for (one, first), (other, second) in itertools.combinations(labels, 2):
        assert not first.overlaps(second), (one, other)


def test_an_error_of_zero_is_named_and_not_drawn(report):
    zero = Accuracy(100, 0.0, 4.4e-7, 9.5e-7, 1.0, 1.0, 0.95)
    exact = ChangeRecord("static_decode", "why", "source", "exact", "kept", "faster", accuracy=zero)
    svg = plots.accuracy(dataclasses.replace(report, changes=[*report.changes, exact]))
    assert "0: bit for bit" in svg
    assert "{12}" not in svg  # no tick at 1e-12
    assert "−12" not in svg
    wrong = Accuracy(100, math.nan, 4.4e-7, 9.5e-7, 1.0, 1.0, 0.95, failures=["NaN"])
    broken = ChangeRecord("bf16", "why", "source", "precision", "rejected", "NaN", accuracy=wrong)
    assert "bit for bit" not in plots.accuracy(dataclasses.replace(report, changes=[broken]))


class _FirstScreen(HTMLParser):
    """Texts of the page above its first table, figure or second heading, with the class they stand under."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._skipped = 0
        self._over = False

    def handle_starttag(self, tag, attrs):
        self._over |= tag in ("h2", "table", "figure")
        self._skipped += tag in ("style", "title")

    def handle_endtag(self, tag):
        self._skipped -= tag in ("style", "title")

    def handle_data(self, data):
        if not self._over and not self._skipped and data.strip():
            self.texts.append(data.strip())


def test_gain_accuracy_and_decoding_stand_in_the_first_screen_of_a_narrow_page(report):
    """500 pixels: the headline, then two columns of cards; nothing else stands above them."""
    decode = Metric("decode", "ms/token", 3.3, 3.2, 3.4, 1.1, 1.0, 1.2, 3.0, 2.9, 3.1)
    seen = dataclasses.replace(report.accuracy, decoded=128, decode_agreement=0.99, own_decode_agreement=0.98)
    full = dataclasses.replace(
        report, totals=Comparison([GAIN, decode], 20, 5.0), accuracy=seen, notes=["a note " * 30] * 3
    )
    page = _FirstScreen()
    page.feed(html.render(full))
    texts = page.texts[: next(i for i, text in enumerate(page.texts) if text.startswith("Note"))]
    joined = " ".join(texts)
    for wanted in ("by merged_qkv", "2.01x", "3.00x decode", "4.32e-07", "top-1", "99.00% decoding agrees"):
        assert wanted in joined, wanted
    width, headline_px, text_px = 500 - 40, 17, 14
    lines = -(-len(full.headline) * 0.56 * headline_px // width)
    cards = len(html.cards(full))
    height = 40 + 1.3 * headline_px * lines + 3 * 1.35 * text_px * -(-cards // 3)
    assert height < 700, f"{lines} lines of headline and {cards} cards"
