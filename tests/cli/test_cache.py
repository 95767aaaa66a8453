"""`tilewright cache`: what it shows, what it removes, and bundles from one machine to another."""

import json

import pytest
from tests.jit.cache_parts import BINARY, Builds, key

from tilewright import settings
from tilewright.jit import cache


@pytest.fixture
def compiled(place, tmp_path):
    """Three kernels in the cache; returns the folder of its entries."""
    settings.reload()
    cache.forget()
    build = Builds(tmp_path)
    cache.get(key(), build)
    cache.get(key("scale", arch="sm_100a"), build)
    cache.get(key("silu_and_mul", kind="host", arch="x86-64-v4", compiler="g++ 13.2", suffix="so"), build)
    yield cache.store().root
    cache.forget()


def answer(done):
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_alone_it_shows_its_commands(tilewright):
    done = tilewright("cache")
    assert done.exit_code == 0
    assert all(f"\n  {name} " in done.stdout for name in ("list", "info", "clear", "export", "import"))


@pytest.mark.parametrize("command", ["list", "info", "clear", "export", "import"])
def test_help_has_json_and_an_example(tilewright, command):
    described = tilewright("cache", command, "--help").stdout
    assert "--json FILE" in described
    assert f"Example: tilewright cache {command} " in described


def test_list(tilewright, compiled):
    lines = tilewright("cache", "list").stdout.splitlines()
    assert lines[0].split() == ["kernel", "kind", "arch", "compiler", "KiB", "unused"]
    assert [line.split()[0] for line in lines[1:]] == ["copy", "scale", "silu_and_mul"]
    assert lines[3].split() == ["silu_and_mul", "host", "x86-64-v4", "g++", "13.2", "3", "0m"]


def test_list_as_json_and_its_filters(tilewright, compiled):
    found = answer(tilewright("cache", "list", "--json", "-"))
    assert [row["name"] for row in found] == ["copy", "scale", "silu_and_mul"]
    assert found[0]["info"] == {"symbol": "copy", "registers": 32}
    assert found[0]["folder"] == str(compiled / key().folder)
    assert [row["name"] for row in answer(tilewright("cache", "list", "--kind", "host", "--json", "-"))] == [
        "silu_and_mul"
    ]
    archs = answer(tilewright("cache", "list", "--arch", "sm_90a, sm_100a", "--json", "-"))
    assert [row["name"] for row in archs] == ["copy", "scale"]


def test_info(tilewright, compiled):
    found = answer(tilewright("cache", "info", "--json", "-"))
    assert found["folder"] == str(compiled)
    assert found["writable"] is True
    assert found["entries"] == 3
    assert found["kinds"]["cuda"]["entries"] == 2
    assert found["bytes"] == sum(of["bytes"] for of in found["kinds"].values()) > 3 * len(BINARY)
    shown = tilewright("cache", "info").stdout
    assert str(compiled) in shown and "3 entries" in shown and "1 entry" in shown


def test_an_empty_cache_is_no_error(tilewright):
    assert answer(tilewright("cache", "list", "--json", "-")) == []
    assert answer(tilewright("cache", "info", "--json", "-"))["entries"] == 0
    assert answer(tilewright("cache", "clear", "--json", "-")) == {"removed": 0}


def test_clear(tilewright, compiled):
    assert answer(tilewright("cache", "clear", "--older-than", "1.5h", "--json", "-")) == {"removed": 0}
    assert answer(tilewright("cache", "clear", "--kind", "host", "--json", "-")) == {"removed": 1}
    assert tilewright("cache", "clear").stdout == f"2 entries removed from {compiled}\n"
    assert list(cache.entries()) == []


def test_a_bundle_from_one_machine_to_another(tilewright, compiled, place, tmp_path, monkeypatch):
    made = answer(tilewright("cache", "export", "kernels.zip", "--arch", "sm_90a", "--json", "-"))
    assert made == {"file": "kernels.zip", "entries": 1, "bytes": (place / "kernels.zip").stat().st_size}
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "second"))
    taken = answer(tilewright("cache", "import", "kernels.zip", "--json", "-"))
    assert taken == {"entries": 1, "folder": str(tmp_path / "second" / "kernels")}
    assert cache.get(key(compiler=""), None).binary == BINARY


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "--kind", "cobol"], "--kind cobol: allowed are cuda, cutile, triton, host."),
        (["clear", "--older-than", "soon"], "--older-than soon: give minutes, hours or days: 45m, 12h, 30d."),
        (["export"], "Missing argument 'FILE'"),
        (["export", "kernels.zip"], "nothing to export"),
        (["export", "."], "is a folder; give a file name"),
        (["import", "none.zip"], "none.zip cannot be read: No such file or directory."),
        (["import", "text.zip"], "text.zip is not a bundle, or is damaged"),
        (["polish"], "No such command 'polish'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(tilewright, place, words, expected):
    (place / "text.zip").write_text("hello")
    done = tilewright("cache", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("tilewright: ") and expected in line
    assert [f.name for f in place.iterdir()] == ["text.zip"]
