"""The README's results are those of the committed measurements, and it stays one page."""

import json
import re
from pathlib import Path

from tilewright.bench import schema
from tilewright.bench.report.cells import mean, ratio
from tilewright.validate.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def rows_by_family():
    """Rows of every result file of the bench, by the family that its page is named after."""
    families = {}
    for path in sorted(RESULTS.glob("*.json")):
        if json.loads(path.read_text()).get("kind") == schema.KIND:
            results = schema.load(path)
            families.setdefault(results.suite, []).extend(results.rows)
    return families


def test_the_table_holds_every_family_as_measured():
    lines = set(re.findall(r"^\| \[\w+\]\(docs/performance/.*\|$", README, re.MULTILINE))
    wanted = set()
    for family, rows in rows_by_family().items():
        ratios = [row.ratio_auto for row in rows if row.ratio_auto is not None]
        lost = sum(value < 1 for value in ratios)
        lowest = ratio(min(ratios)).strip("*")
        wanted.add(f"| [{family}](docs/performance/{family}.md) | {len(rows)} | {mean(ratios)} | {lost} | {lowest} |")
    assert lines == wanted


def test_it_says_in_how_many_modes_the_checker_runs():
    assert f"in {len(MODES)} execution modes" in " ".join(README.split())


def test_it_is_one_page():
    assert len(README.splitlines()) <= 120
