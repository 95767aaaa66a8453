"""Every environment variable the library reads: its type, its other names, what it refuses."""

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tilewright import settings
from tilewright.errors import InputError
from tilewright.settings import Settings, describe

SOURCE = Path(settings.__file__).parent


def test_defaults():
    found = Settings.from_env({})
    assert (found.backend, found.log, found.tuning_table, found.arch) == (None, None, None, None)
    assert found.disable_fallback is False
    assert (found.autotune, found.autotune_seconds) == ("off", 30)
    assert found.cache_dir.name == "tilewright"
    assert found.jit_compiler == "nvrtc"
    assert found.max_jobs >= 1


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TILEWRIGHT_BACKEND", "triton", "backend", "triton"),
        ("TILEWRIGHT_DISABLE_FALLBACK", "1", "disable_fallback", True),
        ("TILEWRIGHT_DISABLE_FALLBACK", "TRUE", "disable_fallback", True),
        ("TILEWRIGHT_DISABLE_FALLBACK", "on", "disable_fallback", True),
        ("TILEWRIGHT_DISABLE_FALLBACK", "0", "disable_fallback", False),
        ("TILEWRIGHT_DISABLE_FALLBACK", "No", "disable_fallback", False),
        ("DISABLE_FALLBACK", "yes", "disable_fallback", True),
        ("TILEWRIGHT_LOG", "INFO", "log", "info"),
        ("TILEWRIGHT_CACHE_DIR", "/data/cache", "cache_dir", Path("/data/cache")),
        ("TILEWRIGHT_CACHE_DIR", "~/cache", "cache_dir", Path.home() / "cache"),
        ("TILEWRIGHT_TUNING_TABLE", "mine.json", "tuning_table", Path("mine.json")),
        ("TILEWRIGHT_ARCH", "sm_100a", "arch", "sm_100a"),
        ("TILEWRIGHT_ARCH", "gfx942", "arch", "gfx942"),
        ("TILEWRIGHT_JIT_COMPILER", "NVCC", "jit_compiler", "nvcc"),
        ("TILEWRIGHT_JIT_DUMP_PTX", "1", "jit_dump_ptx", True),
        ("TILEWRIGHT_MAX_JOBS", "3", "max_jobs", 3),
        ("TILEWRIGHT_CACHE_LIMIT_MB", "64", "cache_limit_mb", 64),
        ("TILEWRIGHT_AUTOTUNE", "First_Call", "autotune", "first_call"),
        ("TILEWRIGHT_AUTOTUNE", "off", "autotune", "off"),
        ("TILEWRIGHT_AUTOTUNE_SECONDS", "5", "autotune_seconds", 5),
    ],
)
def test_a_variable_becomes_a_typed_value(variable, text, field, value):
    assert getattr(Settings.from_env({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("TILEWRIGHT_DISABLE_FALLBACK", "perhaps", "1/0, true/false"),
        ("DISABLE_FALLBACK", "2", "1/0, true/false"),
        ("TILEWRIGHT_LOG", "loud", "debug, info, warning, error, critical"),
        ("TILEWRIGHT_ARCH", "hopper", "sm_90, gfx942"),
        ("TILEWRIGHT_ARCH", "sm_90; rm", "sm_90, gfx942"),
        ("TILEWRIGHT_JIT_COMPILER", "clang", "nvrtc, nvcc"),
        ("TILEWRIGHT_MAX_JOBS", "0", "a whole number from 1"),
        ("TILEWRIGHT_MAX_JOBS", "-2", "a whole number from 1"),
        ("TILEWRIGHT_CACHE_LIMIT_MB", "1.5", "a whole number from 1"),
        ("TILEWRIGHT_AUTOTUNE", "firstcall", "off, first_call"),
        ("TILEWRIGHT_AUTOTUNE", "1", "off, first_call"),
        ("TILEWRIGHT_AUTOTUNE_SECONDS", "0", "a whole number from 1"),
    ],
)
def test_a_malformed_value_is_refused_by_name_with_what_is_allowed(variable, text, allowed):
    with pytest.raises(InputError, match=rf"^{variable}: '{re.escape(text)}' is not .*{re.escape(allowed)}"):
        Settings.from_env({variable: text})


@pytest.mark.parametrize("name", [name for f in fields(Settings) for name in f.metadata["names"]])
def test_an_empty_variable_is_an_unset_one(name):
    assert Settings.from_env({name: ""}) == Settings.from_env({})


def test_the_own_name_outranks_the_shared_one():
    found = Settings.from_env({"TILEWRIGHT_DISABLE_FALLBACK": "0", "DISABLE_FALLBACK": "1"})
    assert found.disable_fallback is False


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/data/xdg")
    assert settings.reload().cache_dir == Path("/data/xdg/tilewright")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings.reload().cache_dir == Path.home() / ".cache" / "tilewright"


def test_the_environment_is_read_once_and_again_on_request(monkeypatch):
    before = settings.current()
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "torch")
    assert settings.current() is before
    assert settings.reload().backend == "torch"
    assert settings.current().backend == "torch"


def test_settings_do_not_change_under_a_reader():
    with pytest.raises(FrozenInstanceError):
        settings.current().backend = "torch"


def test_describe_has_a_row_for_every_field_with_the_value_in_force(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "triton")
    settings.reload()
    rows = describe()
    assert [row["names"] for row in rows] == [list(f.metadata["names"]) for f in fields(Settings)]
    assert all(row["doc"] for row in rows)
    assert {row["names"][0]: row["value"] for row in rows}["TILEWRIGHT_BACKEND"] == "triton"


def test_the_source_names_no_variable_that_is_not_listed():
    listed = {name for row in describe() for name in row["names"]}
    named = {
        name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bTILEWRIGHT_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert named <= listed
