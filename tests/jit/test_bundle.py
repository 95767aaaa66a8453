"""Bundles: made with a compiler, used without one; refused whole when anything in them is wrong."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.jit.cache_parts import BINARY, Builds, key

from tilewright import settings
from tilewright.errors import BackendError, InputError
from tilewright.jit import bundle, cache, store
from tilewright.jit.cache import Built


@pytest.fixture
def made(kernels: Path, tmp_path: Path) -> Path:
    """A bundle of two kernels; the cache in force is the one they were compiled into."""
    cache.get(key(), Builds(tmp_path))
    cache.get(key("scale", kind="host", arch="x86-64-v4", suffix="so", source_suffix="cpp"), Builds(tmp_path))
    assert bundle.export(tmp_path / "kernels.zip", cache.entries()) == 2
    return tmp_path / "kernels.zip"


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of another machine, empty; returns the folder of its entries."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "elsewhere"))
    settings.reload()
    cache.forget()
    return tmp_path / "elsewhere" / "kernels"


def rewrite(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """The same zip file with its members changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_a_kernel_travels_to_a_machine_without_a_compiler(made, elsewhere):
    with pytest.raises(BackendError, match="cache import"):
        cache.get(key(compiler=""), None)
    assert bundle.load(made) == 2
    found = cache.get(key(compiler=""), None)
    assert (found.binary, found.info["registers"]) == (BINARY, 32)
    assert found.path.is_relative_to(elsewhere)
    assert (found.path.parent / "kernel.cu").read_text() == key().source
    assert (found.path.parent / "kernel.ptx").read_bytes() == b".version 9.0"


def test_a_machine_with_the_same_compiler_need_not_compile(made, elsewhere, tmp_path):
    bundle.load(made)
    build = Builds(elsewhere)
    cache.get(key(), build)
    assert build.count == 0


def test_the_manifest_says_what_it_is(made):
    with zipfile.ZipFile(made) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        assert archive.testzip() is None
    assert manifest["schema"] == bundle.SCHEMA
    assert set(manifest) == {"schema", "tilewright", "created", "entries"}
    assert len(manifest["entries"]) == 2


def test_a_second_import_changes_nothing(made, elsewhere):
    bundle.load(made)
    before = {f: f.stat().st_mtime_ns for f in elsewhere.rglob("kernel.*")}
    assert bundle.load(made) == 2
    assert {f: f.stat().st_mtime_ns for f in elsewhere.rglob("kernel.*")} == before


def test_an_import_mends_a_damaged_entry(made, elsewhere):
    bundle.load(made)
    damaged = cache.find(key()).path
    os.truncate(damaged, 10)
    cache.forget()
    assert bundle.load(made) == 2
    assert damaged.read_bytes() == BINARY


def _manifest(**changed):
    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps({**json.loads(members["manifest.json"]), **changed}).encode()

    return change


def _edit(ending: str, edit: Callable[[bytes], bytes]):
    def change(members: dict[str, bytes]) -> None:
        [name] = [name for name in members if name.startswith("copy") and name.endswith(ending)]
        members[name] = edit(members[name])

    return change


def _move(members: dict[str, bytes]) -> None:
    """An entry under the key of another, with a manifest that agrees."""
    manifest = json.loads(members["manifest.json"])
    [old] = [name for name in manifest["entries"] if name.startswith("copy")]
    new = key("copy", flags=("-O0",)).folder
    manifest["entries"][new] = manifest["entries"].pop(old)
    members["manifest.json"] = json.dumps(manifest).encode()
    for name in [name for name in members if name.startswith(old)]:
        members[name.replace(old, new)] = members.pop(name)


WRONG = {
    "other schema": (_manifest(schema=99), "has schema 99, this version reads 1"),
    "no manifest": (lambda members: members.pop("manifest.json"), "is not a bundle: it has no readable manifest.json"),
    "manifest is a list": (lambda m: m.update({"manifest.json": b"[]"}), "no readable manifest.json"),
    "entries are a list": (_manifest(entries=["copy"]), "no readable manifest.json"),
    "flipped byte": (_edit(".cubin", lambda data: b"\xff" + data[1:]), "kernel.cubin differs from its checksum"),
    "edited source": (_edit(".cu", lambda data: data + b"\n"), "kernel.cu differs from its checksum"),
    "edited entry.json": (_edit("entry.json", lambda data: data.replace(b"32", b"64")), "entry.json differs from"),
    "file missing": (lambda m: m.pop(next(n for n in m if n.endswith("ptx"))), "kernel.ptx is missing"),
    "entry.json missing": (lambda m: m.pop(next(n for n in m if n.endswith("entry.json"))), "has no entry.json"),
    "file too much": (lambda m: m.update({f"{key().folder}/more": b"x"}), "more is unknown"),
    "path out of the cache": (lambda m: m.update({"../../evil": b"x"}), "is not in the manifest"),
    "name out of the cache": (_manifest(entries={"..": ""}), "is not in the manifest|is not the name of an entry"),
    "another's place": (_move, "is not the place of what it holds"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bundle_with_anything_wrong_is_refused_and_writes_nothing(made, elsewhere, wrong):
    change, reason = WRONG[wrong]
    rewrite(made, change)
    with pytest.raises(InputError, match=reason):
        bundle.load(made)
    assert not elsewhere.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 but nothing more"])
def test_what_is_no_zip_is_refused(kernels, tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(InputError, match="is not a bundle"):
        bundle.load(tmp_path / "other")


def test_a_truncated_bundle_is_refused(made, elsewhere):
    os.truncate(made, made.stat().st_size // 2)
    with pytest.raises(InputError, match="is not a bundle, or is damaged"):
        bundle.load(made)
    assert not elsewhere.exists()


def test_damage_inside_the_compressed_data_is_refused(made, elsewhere):
    data = bytearray(made.read_bytes())
    for position in range(100, len(data) // 2, 50):
        data[position] ^= 0x55
    made.write_bytes(data)
    with pytest.raises(InputError):
        bundle.load(made)
    assert not elsewhere.exists()


def test_no_file_and_a_folder_are_refused(kernels, tmp_path):
    for path in (tmp_path / "none.zip", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            bundle.load(path)


def test_a_cache_that_cannot_be_written_is_an_error_not_a_loss(made, elsewhere, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(InputError, match=f"{elsewhere} cannot be written: No space left on device"):
        bundle.load(made)
    assert list(cache.entries()) == []


def test_a_corrupt_entry_is_not_exported(kernels, tmp_path):
    os.truncate(cache.get(key(), Builds(tmp_path)).path, 10)
    (tmp_path / "kernels.zip").write_text("the one before")
    with pytest.raises(InputError, match="cannot be exported: kernel.cubin differs"):
        bundle.export(tmp_path / "kernels.zip", cache.entries())
    assert (tmp_path / "kernels.zip").read_text() == "the one before"
    assert [f.name for f in tmp_path.iterdir() if "partial" in f.name] == []


def test_nothing_is_not_exported(kernels, tmp_path):
    with pytest.raises(InputError, match="empty bundle"):
        bundle.export(tmp_path / "kernels.zip", [])


def test_an_import_keeps_the_size_bound_and_what_it_brought(made, elsewhere, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_LIMIT_MB", "1")
    settings.reload()
    cache.get(key("large"), lambda: Built(bytes(1024 * 1024), {}))
    bundle.load(made)
    assert [entry.name for entry in cache.entries()] == ["copy", "scale"]
