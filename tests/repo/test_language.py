"""The source speaks the field's language: docs/glossary.md lists the words, this test holds the source to them."""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE = CHECKOUT / "src" / "tilewright"
ROOMS = sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py")))
FOLDERS = ("benchmarks", "examples", "scripts", "tests")  # beside the source: of its rules, that of words
# A variable is a noun of the field: no preposition, no bare participle.
# fmt: off
NOT_NAMES = {
    "again", "apart", "asked", "at", "behind", "beside", "by", "done", "found", "given", "here", "kept", "known",
    "made", "mine", "nothing", "of", "own", "said", "seen", "taken", "there", "told", "turned", "upon", "wanted",
    "whole", "wide", "wish", "within",
}
# fmt: on
PUBLIC = {("hardware/toolchain.py", "found"), ("mask/tables.py", "by")}  # names that users' programs hold
NOT_FIRST = re.compile(r"\s*(Of|As|That|From|Whose)\b")
NOT_WORDS = re.compile(r"\b(whoever|nobody|himself|herself|as everywhere|at one time)\b", re.IGNORECASE)
MADE_UP = {"tests/bench/test_appending.py", "tests/bench/test_suite.py"}  # a row and a peer that do not exist


def _python(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb_or_a_noun(room):
    texts = [
        (path, node.lineno, node.value.value)
        for path in _python(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    lines = [f"{path.relative_to(SOURCE)}:{line} {text[:40]}" for path, line, text in texts if NOT_FIRST.match(text)]
    assert lines == []


@pytest.mark.parametrize("room", ROOMS)
def test_variables_are_nouns(room):
    names = []
    for path in _python(room):
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in NOT_NAMES and (str(path.relative_to(SOURCE)), name) not in PUBLIC:
                names.append(f"{path.relative_to(SOURCE)}:{node.lineno} {name}")
    assert names == []


def _lines_with_not_words(paths: list[Path]) -> list[str]:
    """Lines, names in them included: `a_word_of_a_name` is read as four words."""
    return [
        f"{path.relative_to(CHECKOUT)}:{number} {line}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NOT_WORDS.search(line.replace("_", " "))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_words(room):
    assert _lines_with_not_words([*_python(room), *sorted((SOURCE / room).rglob("*.cuh"))]) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_beside_the_source(folder):
    texts = sorted(path for kind in ("*.py", "*.cuh") for path in (CHECKOUT / folder).rglob(kind))
    passed_over = {CHECKOUT / path for path in MADE_UP} | {Path(__file__).resolve()}
    assert texts != []
    assert _lines_with_not_words([path for path in texts if path not in passed_over]) == []
