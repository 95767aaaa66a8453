"""The commit of a row: what git says of our own checkout, or the environment of a copy; nothing where neither knows."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.test_report import MACHINE, WON

from tilewright import settings
from tilewright.bench import commit as module
from tilewright.bench.commit import commit
from tilewright.bench.schema import Results, load


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)
    settings.reload()
    module._of_checkout.cache_clear()
    yield
    monkeypatch.undo()
    settings.reload()
    module._of_checkout.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that tracks a file of the module's name."""
    (tmp_path / Path(module.__file__).name).write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_checkout_says_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")[:12]
    (checkout / "notes").write_text("untracked")
    assert module._of_checkout(checkout) == head
    module._of_checkout.cache_clear()
    (checkout / Path(module.__file__).name).write_text("changed")
    assert module._of_checkout(checkout) == f"{head}+"


def test_a_checkout_around_an_installed_package_is_not_asked(checkout: Path) -> None:
    site = checkout / "site-packages"
    site.mkdir()
    (site / Path(module.__file__).name).write_text("")
    assert module._of_checkout(site) == ""


def test_no_git_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert module._of_checkout(checkout) == ""


def test_a_copy_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "0123456789ab")
    settings.reload()
    assert commit() == "0123456789ab"


def test_a_row_carries_it_to_the_disk_and_older_rows_stay_without(tmp_path: Path) -> None:
    rows = [replace(WON, commit="0123456789ab"), replace(WON, case="older")]
    Results("norm", MACHINE, rows=rows).save(tmp_path / "norm.json")
    assert load(tmp_path / "norm.json").rows == rows
    assert (tmp_path / "norm.json").read_text().count("commit") == 1  # the column; no empty value in a row
