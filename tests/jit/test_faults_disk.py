"""The kernel cache on a disk that fails: damaged entries, no room, no permission, a wrong clock, too much of it."""

import errno
import json
import logging
import os
import time
from pathlib import Path

import pytest
from tests.jit.cache_parts import BINARY, Builds, finish, key, start

from tilewright import settings
from tilewright.jit import cache, store
from tilewright.jit.cache import Built
from tilewright.jit.headers import header_hash

# ------------------------------------------------------------------------------------------------------------- damage


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """The right checksums and the wrong kernel: the entry of another request in this one's place."""
    other = cache.get(key("other"), lambda: Built(b"other", {}))
    (path / "kernel.cubin").write_bytes(b"other")
    (path / "entry.json").write_bytes((other.path.parent / "entry.json").read_bytes())


DAMAGE = {
    "truncated binary": (lambda e: os.truncate(e / "kernel.cubin", 100), "kernel.cubin differs from its checksum"),
    "flipped byte": (lambda e: _flip(e / "kernel.cubin", 1000), "kernel.cubin differs from its checksum"),
    "no binary": (lambda e: (e / "kernel.cubin").unlink(), "kernel.cubin is missing"),
    "no entry.json": (lambda e: (e / "entry.json").unlink(), "entry.json is missing"),
    "empty entry.json": (lambda e: (e / "entry.json").write_bytes(b""), "entry.json is not JSON"),
    "truncated entry.json": (lambda e: os.truncate(e / "entry.json", 200), "entry.json is not JSON"),
    "edited entry.json": (
        lambda e: (e / "entry.json").write_text((e / "entry.json").read_text().replace("32", "64")),
        "entry.json differs from its checksum",
    ),
    "entry.json of another kind": (lambda e: (e / "entry.json").write_text("[]"), "entry.json differs from its"),
    "another request": (_swap, "it answers another request"),
    "empty folder": (lambda e: [f.unlink() for f in e.iterdir()], "entry.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_dropped_and_rebuilt_with_one_line(kernels, tmp_path, caplog, damage):
    build = Builds(tmp_path)
    folder = cache.get(key(), build).path.parent
    harm, reason = DAMAGE[damage]
    harm(folder)
    caplog.clear()
    cache.forget()
    again = cache.get(key(), build)
    assert (again.binary, again.path.read_bytes(), build.count) == (BINARY, BINARY, 2)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{folder} is dropped and built again: {reason}" in record.message
    cache.forget()
    cache.get(key(), build)
    assert build.count == 2


def test_every_flipped_byte_of_entry_json_is_found(kernels, tmp_path):
    folder = cache.get(key(), Builds(tmp_path)).path.parent
    size = (folder / "entry.json").stat().st_size
    for position in range(0, size - 1, 7):  # not the newline at the end, which says nothing
        _flip(folder / "entry.json", position)
        cache.forget()
        assert cache.find(key()) is None, position
        _flip(folder / "entry.json", position)
    cache.forget()
    assert cache.find(key()) is not None


def test_an_entry_of_another_schema_is_rebuilt(kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tilewright.jit.entry.SCHEMA", 0)
    cache.get(key(), Builds(tmp_path))
    monkeypatch.undo()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(kernels.parent))
    settings.reload()
    cache.forget()
    cache.get(key(), Builds(tmp_path))
    assert "entry.json has schema 0, this version reads 1" in caplog.text


def test_without_a_compiler_a_damaged_entry_is_passed_over(kernels, tmp_path, caplog):
    old = cache.get(key(compiler="nvrtc 12.9"), lambda: Built(b"old", {}))
    new = cache.get(key(), lambda: Built(b"new", {}))
    _flip(new.path, 0)
    cache.forget()
    assert cache.get(key(compiler=""), None).binary == b"old"
    assert f"{new.path.parent} is passed over" in caplog.text
    assert old.path.exists()


# ------------------------------------------------------------------------------------------------------ unusable disks


def _fails(code: int):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def _file_in_place(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.parent.write_text("not a folder")


def _read_only(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("mkdir", "rename"):
        monkeypatch.setattr(Path, method, _fails(errno.EROFS))
    monkeypatch.setattr(os, "utime", _fails(errno.EROFS))


def _no_permission(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", _fails(errno.EACCES))


def _full(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_write", _fails(errno.ENOSPC))


def _full_after_a_file(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _fails(errno.ENOSPC))


def _full_at_rename(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", _fails(errno.ENOSPC))


UNUSABLE = [_file_in_place, _read_only, _no_permission, _full, _full_after_a_file, _full_at_rename]


@pytest.mark.parametrize("breaks", UNUSABLE, ids=lambda f: f.__name__.strip("_"))
def test_an_unusable_disk_means_memory_and_one_warning(kernels, tmp_path, monkeypatch, caplog, breaks):
    breaks(kernels, monkeypatch)
    build = Builds(tmp_path)
    for name in ("a", "b", "a", "b"):
        made = cache.get(key(name), build)
        assert (made.binary, made.path) == (BINARY, None)
    assert build.count == 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{kernels} cannot be written" in record.message
    assert "TILEWRIGHT_CACHE_DIR" in record.message
    monkeypatch.undo()
    assert not (kernels / ".tmp").is_dir() or list((kernels / ".tmp").iterdir()) == []


def test_a_real_limit_of_the_operating_system(kernels, tmp_path):
    """A process that may write no file above 1 KB: the kernel itself refuses half way."""
    import resource
    import signal

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        made = cache.get(key(), lambda: Built(BINARY, {}))
        assert (made.binary, made.path) == (BINARY, None)

    assert finish(start(limited)) == 0
    assert list(cache.entries()) == []
    assert list((kernels / ".tmp").iterdir()) == []


def test_a_disk_that_can_only_be_read_serves_what_it_has(kernels, tmp_path, monkeypatch, caplog):
    cache.get(key(), Builds(tmp_path))
    cache.forget()
    _read_only(kernels, monkeypatch)
    found = cache.get(key(), None)
    assert found.path.read_bytes() == found.binary == BINARY
    assert caplog.records == []


def test_a_disk_that_recovers_is_used_again(kernels, tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        _full(kernels, full)
        assert cache.get(key("a"), Builds(tmp_path)).path is None
    assert cache.get(key("b"), Builds(tmp_path)).path.exists()


def test_a_file_system_without_locks_still_caches(kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tilewright.jit.lock.KeyLock.take", _fails(errno.ENOLCK))
    build = Builds(tmp_path)
    assert cache.get(key(), build).path.exists()
    cache.forget()
    assert cache.get(key(), build).binary == BINARY
    assert build.count == 1
    assert caplog.records == []


# --------------------------------------------------------------------------------------------------------------- clock


def _used(name: str, when: float) -> None:
    [entry] = [e for e in cache.entries() if e.name == name]
    os.utime(entry.folder / "entry.json", (when, when))


@pytest.mark.parametrize("when", [time.time() + 10 * 365 * 86400, 0.0], ids=["future", "1970"])
def test_a_wrong_clock_hides_no_entry(kernels, tmp_path, when):
    build = Builds(tmp_path)
    folder = cache.get(key(), build).path.parent
    for file in (*folder.iterdir(), folder):
        os.utime(file, (when, when))
    cache.forget()
    cache.get(key(), build)
    assert build.count == 1
    assert abs((folder / "entry.json").stat().st_mtime - time.time()) < 60  # the use put it right


# ---------------------------------------------------------------------------------------------------------- size bound


@pytest.fixture
def one_mib(kernels, monkeypatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_LIMIT_MB", "1")
    settings.reload()


def _make(name: str, kib: int = 300) -> None:
    cache.get(key(name), lambda: Built(name.encode()[:1] * (kib * 1024), {}))


def _names() -> list[str]:
    return [entry.name for entry in cache.entries()]


def test_the_least_recently_used_go_first(kernels, one_mib):
    for age, name in enumerate(("c", "b", "a")):
        _make(name)
        _used(name, time.time() - 3600 * (10 - age))
    cache.forget()
    cache.find(key("c"))  # the oldest, used again just now
    _make("d")
    assert _names() == ["a", "c", "d"]
    assert {f.name for f in (kernels / ".locks").iterdir()} == {f"{key(n).folder}.lock" for n in "acd"}


def test_an_entry_larger_than_the_bound_stays_for_this_call(kernels, one_mib):
    _make("a")
    _make("huge", 2000)
    assert _names() == ["huge"]
    _make("b")
    assert _names() == ["b"]


def test_a_time_in_the_future_does_not_keep_an_entry_for_ever(kernels, one_mib):
    _make("a")
    _make("b")
    _make("c")
    _used("b", time.time() + 86400)
    _make("d")
    assert _names() == ["a", "c", "d"]


def test_what_another_process_works_on_is_not_evicted(kernels, one_mib):
    _make("a")
    _used("a", time.time() - 3600)
    _make("b")
    _make("c")
    lock = cache.store().lock(key("a").folder)
    assert lock.take()
    finish(start(lambda: _make("d")))
    lock.give()
    assert "a" in _names()
    assert len(_names()) == 3


def test_an_entry_that_cannot_be_removed_does_not_hurt_the_new_one(kernels, one_mib, monkeypatch, caplog):
    """A shared folder with somebody else's entries."""
    for name in "abc":
        _make(name)
    monkeypatch.setattr(store.Store, "drop", _fails(errno.EACCES))
    assert cache.get(key("d"), lambda: Built(bytes(300 * 1024), {})).path.exists()
    assert [record.message for record in caplog.records if "cannot be removed" in record.message] != []


# ------------------------------------------------------------------------------------------------------------- headers


def test_a_header_edit_rebuilds_and_a_moved_installation_does_not(kernels, tmp_path):
    source, build = "#include <tilewright/copy.cuh>\n", Builds(tmp_path)
    include = tmp_path / "lib" / "python3.11" / "include"
    header = include / "tilewright" / "copy.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n")

    def load() -> None:
        cache.forget()
        cache.get(key(source=source, headers=header_hash(source, [include])), build)

    load()
    load()
    assert build.count == 1
    header.write_text("#pragma once\n// edited\n")
    load()
    assert build.count == 2
    include = include.rename(tmp_path / "lib" / "moved")
    load()
    assert build.count == 2
    [entry, _] = cache.entries()
    assert str(tmp_path) not in json.dumps(entry.info) + (entry.folder / "entry.json").read_text()
