"""The wheel is small, pure Python and complete."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_WHEEL_BYTES = 9 << 18


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout with the installed build backend, so that nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    program = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_is_pure_python_and_small(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {"tilewright", "tilewright-0.1.0"}
    assert "tilewright/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".cubin", ".pyc"))]


def test_wheel_holds_every_source_file(wheel):
    package = ROOT / "src" / "tilewright"
    sources = {
        f"tilewright/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix in {".py", ".json", ".j2", ".html", ".css", ".cuh", ".h"}
    }
    assert sources <= set(zipfile.ZipFile(wheel).namelist())
