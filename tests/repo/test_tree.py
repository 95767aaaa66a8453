"""The checkout keeps the limits that make it readable: sizes, names, and commands that exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_WRITTEN_BYTES = 10_000_000  # by people
MAX_TRACKED_BYTES = 24_000_000
MAX_LINES = 400  # a file that wants to be longer usually wants another room
MAX_FOLDER_FILES = 20  # aim at 15

# What programs write: measurements and what is rendered from them, tuning tables, the ledger, the embedded model.
MADE = (
    "benchmarks/results/",
    "docs/masks/",
    "docs/ops/",
    "docs/performance/",
    "docs/plots/",
    "examples/stdlib_lm/model/",
    "src/tilewright/tables/",
    "tests/compile/resources/",
)

# Files that may be longer, each with its reason.
LONGER: dict[str, int] = {}

# A path into somebody's machine has no business in what we publish. Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~:])/(?:home|root|Users|work|tmp)/(?=\w)")
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".cuh", ".cu", ".html", ".j2", ".css", ""}


def _tracked() -> list[Path]:
    """Tracked files, and new ones that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({ROOT / name for name in names if name and (ROOT / name).is_file()})


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    return _tracked()


def test_the_tree_is_small(tracked):
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked}
    written = {name: size for name, size in sizes.items() if not name.startswith(MADE)}
    for kind, limit in ((sizes, MAX_TRACKED_BYTES), (written, MAX_WRITTEN_BYTES)):
        largest = sorted(kind, key=kind.__getitem__, reverse=True)[:5]
        assert sum(kind.values()) <= limit, [f"{name}: {sizes[name]}" for name in largest]
    assert all(any(name.startswith(made) for name in sizes) for made in MADE), "nothing is made there"


def test_no_python_file_is_too_long(tracked):
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in tracked if p.suffix == ".py"}
    assert {name: n for name, n in lines.items() if n > LONGER.get(name, MAX_LINES)} == {}


def test_exceptions_to_the_length_are_needed(tracked):
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in tracked if p.suffix == ".py"}
    assert [name for name in LONGER if lines.get(name, 0) <= MAX_LINES] == []


def test_no_source_folder_is_crowded(tracked):
    folders: dict[Path, int] = {}
    for path in tracked:
        if ROOT / "src" in path.parents and not str(path.relative_to(ROOT)).startswith(MADE):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(f.relative_to(ROOT)): n for f, n in folders.items() if n > MAX_FOLDER_FILES} == {}


def test_no_file_is_called_utils(tracked):
    assert [
        str(p.relative_to(ROOT)) for p in tracked if re.fullmatch(r"_?(utils?|helpers?|misc|common)\.py", p.name)
    ] == []


def test_no_path_of_one_machine_is_published(tracked):
    found = []
    for path in tracked:
        if path.suffix in TEXT and MACHINE_PATH.search(path.read_text(errors="ignore")):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_of_the_documents_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b", _code(ROOT / document)))
    assert named, f"{document} names no make command"
    assert named <= targets


def test_readme_is_one_page_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert {"make demo", "make test"} <= set(re.findall(r"make [a-z]+", _code(ROOT / "README.md")))


def _code(document: Path) -> str:
    """The code of a Markdown document: fenced blocks and inline spans."""
    text = document.read_text()
    return "\n".join([*re.findall(r"```.*?```", text, re.DOTALL), *re.findall(r"`[^`\n]+`", text)])
