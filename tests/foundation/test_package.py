"""`import tilewright`: everything it names exists, and is imported on first use."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import tilewright
from tilewright import errors

SOURCE = Path(tilewright.__file__).parents[1]


def fresh(program: str) -> list[str]:
    """Words a fresh Python prints."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", tilewright.__all__)
def test_every_public_name_exists_and_is_listed(name):
    assert name in dir(tilewright)
    assert getattr(tilewright, name) is not None


@pytest.mark.parametrize("name", tilewright._MODULES)
def test_every_package_is_reached_as_an_attribute(name):
    assert name in dir(tilewright)
    found = getattr(tilewright, name)
    assert isinstance(found, ModuleType)
    assert found.__name__ == f"tilewright.{name}"


def test_every_package_below_is_listed():
    """But the command line, plug-ins of other engines, and what is there for the others or reached by a function."""
    below = {module.name for module in iter_modules(tilewright.__path__)}
    assert below - set(tilewright._MODULES) == {
        *("__main__", "assistant", "catalogue", "cli", "generation", "jit", "log", "plugins", "version")
    }


def test_no_function_is_called_like_a_submodule():
    """Importing the submodule would replace the function."""
    assert not [name for name in tilewright._HOME if find_spec(f"tilewright.{name}")]


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tilewright' has no attribute 'nonsense'"):
        _ = tilewright.nonsense
    assert not hasattr(tilewright, "nonsense")


def test_dir_is_sorted_and_names_the_version():
    assert dir(tilewright) == sorted(dir(tilewright))
    assert "__version__" in dir(tilewright)


def test_naming_the_package_loads_nothing_and_dir_neither():
    program = (
        "import sys, tilewright; dir(tilewright); print(*[m for m in sys.modules if m.startswith(('tile', 'torch'))])"
    )
    assert sorted(" ".join(fresh(program)).split()) == ["tilewright", "tilewright.version"]


def test_an_attribute_is_looked_up_once():
    program = "import tilewright; tilewright.errors; print('errors' in vars(tilewright))"
    assert fresh(program) == ["True"]


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_is_a_tilewright_error_and_says_what_it_means(name):
    found = getattr(errors, name)
    assert issubclass(found, errors.TilewrightError)
    assert found.__doc__
    assert name in errors.__doc__


def test_errors_are_also_what_python_calls_them():
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.TableError, ValueError)
    assert issubclass(errors.BackendError, RuntimeError)


def test_explain_needs_no_import_of_the_ops():
    program = "import torch, tilewright; print(tilewright.explain('rms_norm', torch.ones(2, 4), torch.ones(4)).backend)"
    assert fresh(program) in (["cpu"], ["torch"])  # where there is a C++ compiler, and where there is none
