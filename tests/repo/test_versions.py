"""What is declared as supported is what the matrix of versions runs."""

import importlib.util
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
def test_the_oldest_declared_torch_and_triton_are_in_the_matrix(versions, declared, library):
    tested = versions.LIBRARIES[library].versions
    oldest = next(part.version for part in declared[library].specifier if part.operator == ">=")
    assert Version(tested[0]).release[:2] == Version(oldest).release[:2]


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
