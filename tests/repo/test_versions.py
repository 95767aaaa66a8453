"""What is declared as supported is what the matrix of versions runs."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tilewright.models.transformers_names import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def versions(monkeypatch):
    spec = importlib.util.spec_from_file_location("versions", ROOT / "scripts" / "versions.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "versions", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def declared() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *project["optional-dependencies"]["hf"],
        *project["optional-dependencies"]["dev"],
    ]
    return {found.name: found for found in map(Requirement, lines)}


def test_every_declared_minor_release_of_transformers_is_in_the_matrix(versions, declared):
    tested = [Version(v) for v in versions.LIBRARIES["transformers"].versions]
    allowed = declared["transformers"].specifier
    assert all(version in allowed for version in tested)
    assert [v.release[:2] for v in tested] == [(5, minor) for minor in range(SUPPORTED[0][1], SUPPORTED[1][1] + 1)]
    assert (tested[0].release[:2], tested[-1].release[:2]) == SUPPORTED
    assert Version(f"5.{SUPPORTED[0][1] - 1}.9") not in allowed
    assert Version(f"5.{SUPPORTED[1][1] + 1}.0") not in allowed


@pytest.mark.parametrize("library", ["torch", "triton"])
def test_the_ends_of_what_is_declared_of_torch_and_triton_are_in_the_matrix(versions, declared, library):
    tested = [Version(v) for v in versions.LIBRARIES[library].versions]
    (oldest,) = (Version(part.version) for part in declared[library].specifier if part.operator == ">=")
    (beyond,) = (Version(part.version) for part in declared[library].specifier if part.operator == "<")
    assert tested[0].release[:2] == oldest.release[:2]
    assert (tested[-1].major, tested[-1].minor + 1) == beyond.release[:2]


def test_every_declared_minor_release_of_triton_is_in_the_matrix(versions):
    tested = [Version(v) for v in versions.LIBRARIES["triton"].versions]
    assert [v.release[:2] for v in tested] == [(3, tested[0].minor + i) for i in range(len(tested))]


@pytest.mark.parametrize("library", ["transformers", "torch", "triton"])
def test_what_was_tried_is_written_down(versions, library):
    page = (ROOT / "docs" / "versions.md").read_text()
    assert [v for v in versions.LIBRARIES[library].versions if v not in page] == []


def test_python_is_declared_as_it_was_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line}
    row = next(
        line for line in (ROOT / "docs" / "versions.md").read_text().splitlines() if line.startswith("| Python ")
    )
    assert named == set(re.findall(r"\b(3\.\d+)\.\d+", row))
    assert project["requires-python"] == f">={min(named, key=Version)}"


class TestMatrix:
    """What `scripts/versions.py` asks pip for, and what it makes of the answers."""

    def test_a_build_with_another_label_is_none(self, versions, monkeypatch):
        listed = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.0+cpu\n"
        monkeypatch.setattr(versions, "pip", lambda *words: listed)
        assert versions.newest("torch", versions.LIBRARIES["torch"]) == "2.13.0"
        assert versions.newest("torch", versions.Library((), ())) == "2.15.0"

    def test_the_cpu_build_is_asked_for_by_its_label(self, versions, monkeypatch, tmp_path):
        asked = []
        monkeypatch.setattr(versions, "FOLDERS", tmp_path)
        monkeypatch.setattr(versions, "unfit", lambda target, name: [])
        monkeypatch.setattr(versions, "pip", lambda *words: asked.append(words) or (tmp_path / "torch-2.11.0").mkdir())
        versions.folder("torch", "2.11.0", versions.LIBRARIES["torch"])
        assert [word for words in asked for word in words if word.startswith("torch")] == ["torch==2.11.0+cpu"]

    def test_what_the_index_lacks_fails_alone(self, versions, monkeypatch, capsys):
        def lacking(*words):
            raise versions.UnavailableError("no such version")

        monkeypatch.setattr(versions, "pip", lacking)
        monkeypatch.setattr(versions, "FOLDERS", Path("/there/is/none"))
        monkeypatch.setattr(sys, "argv", ["versions.py", "torch", "triton", "--newest"])
        monkeypatch.setattr(versions, "version", lambda name: "0.0")
        with pytest.raises(SystemExit, match="torch newest, torch 2.11.0, torch 2.13.0, triton newest, triton 3.6.0"):
            versions.main()
        assert "no such version" in capsys.readouterr().out


def test_the_pinned_versions_are_in_the_matrix(versions):
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for library in ("transformers", "triton"):
        assert pins[library] in versions.LIBRARIES[library].versions


def test_private_names_of_transformers_have_one_home():
    """No other module imports from a module of transformers, or asks for a private method of a generation config."""
    found = []
    for file in (ROOT / "src" / "tilewright").rglob("*.py"):
        text = file.read_text()
        if file.name != "transformers_names.py" and (
            "from transformers." in text or "import transformers." in text or "_get_default_generation_params" in text
        ):
            found.append(file.name)
    assert found == []
