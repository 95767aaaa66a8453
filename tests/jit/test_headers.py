"""The header hash: editing any header a source can reach changes it, where the headers lie does not."""

import os
import shutil
from pathlib import Path

import pytest

from tilewright.jit.headers import header_hash

SOURCE = "#include <tilewright/copy.cuh>\n#include <cstdint>\n__global__ void f() {}\n"


@pytest.fixture
def include(tmp_path: Path) -> Path:
    """copy.cuh includes ptx/load.cuh beside it, which goes up to types.cuh."""
    folder = tmp_path / "include"
    (folder / "tilewright" / "ptx").mkdir(parents=True)
    (folder / "tilewright" / "copy.cuh").write_text('#pragma once\n  #  include "ptx/load.cuh"\n')
    (folder / "tilewright" / "ptx" / "load.cuh").write_text('#pragma once\n#include "../types.cuh"\n')
    (folder / "tilewright" / "types.cuh").write_text('#pragma once\n#include "copy.cuh"\n')  # a circle
    (folder / "tilewright" / "unused.cuh").write_text("#pragma once\n")
    return folder


def test_only_included_headers_count(include):
    before = header_hash(SOURCE, [include])
    (include / "tilewright" / "unused.cuh").write_text("changed")
    assert header_hash(SOURCE, [include]) == before
    assert header_hash("int main() {}", [include]) == ""
    assert header_hash("#include <cstdint>", [include]) == ""


@pytest.mark.parametrize("name", ["copy.cuh", "ptx/load.cuh", "types.cuh"])
def test_an_edit_anywhere_below_changes_it(include, name):
    before = header_hash(SOURCE, [include])
    path = include / "tilewright" / name
    path.write_text(path.read_text() + "// edited\n")
    assert header_hash(SOURCE, [include]) != before


def test_an_edit_that_keeps_the_size_is_seen(include):
    before = header_hash(SOURCE, [include])
    path = include / "tilewright" / "types.cuh"
    path.write_text(path.read_text().replace("once", "twice"[:4]))
    assert header_hash(SOURCE, [include]) != before


def test_an_edit_under_an_unchanged_clock_is_seen(include):
    """An editor that replaces the file, and a clock that stands still."""
    path = include / "tilewright" / "types.cuh"
    before, stat = header_hash(SOURCE, [include]), path.stat()
    fresh = path.with_suffix(".new")
    fresh.write_text(path.read_text().replace("once", "twic"))
    os.utime(fresh, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    fresh.rename(path)
    assert header_hash(SOURCE, [include]) != before


def test_moving_the_folder_does_not_change_it(include, tmp_path):
    before = header_hash(SOURCE, [include])
    moved = tmp_path / "elsewhere" / "site-packages"
    shutil.copytree(include, moved)
    assert header_hash(SOURCE, [moved]) == before


def test_a_header_that_shadows_another_changes_it(include, tmp_path):
    first = tmp_path / "first"
    before = header_hash(SOURCE, [first, include])
    (first / "tilewright").mkdir(parents=True)
    (first / "tilewright" / "copy.cuh").write_text("#pragma once\n")
    assert header_hash(SOURCE, [first, include]) != before


def test_quotes_look_beside_the_header_first_and_angles_do_not(tmp_path):
    for folder, text in (("a", '#include "x.h"\n'), ("b", "#include <x.h>\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "start.h").write_text(text)
        (tmp_path / folder / "x.h").write_text("beside\n")
    (tmp_path / "x.h").write_text("root\n")
    hashes = {name: header_hash(f"#include <{name}/start.h>", [tmp_path]) for name in "ab"}
    (tmp_path / "x.h").write_text("root, edited\n")
    after = {name: header_hash(f"#include <{name}/start.h>", [tmp_path]) for name in "ab"}
    assert after["a"] == hashes["a"]
    assert after["b"] != hashes["b"]
