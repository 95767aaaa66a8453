"""Generated pages are those that the contracts and the committed results give, and short enough to be read."""

import re
import subprocess
import sys
from pathlib import Path

from tilewright.bench.report import pages

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = ROOT / "docs" / "performance"
MAX_PAGE_BYTES = 100_000


def test_op_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "scripts/op_pages.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_performance_pages_are_up_to_date():
    """Texts; a plot depends on the version of matplotlib, so those that pages name exist, and no others."""
    rendered = pages(ROOT / "benchmarks" / "results")
    assert {path.name: path.read_text() for path in PERFORMANCE.iterdir()} == rendered, "run make docs"
    plots = {name for text in rendered.values() for name in re.findall(r"\(\.\./plots/([^)]+)\)", text)}
    assert {path.name for path in (ROOT / "docs" / "plots").iterdir()} == plots


def test_no_page_is_too_long():
    assert [str(path) for path in (ROOT / "docs").rglob("*.md") if path.stat().st_size > MAX_PAGE_BYTES] == []


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")):
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#([^)]+))?\)", page.read_text()):
            target = page.parent / link
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}{anchor and '#'}{anchor}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
