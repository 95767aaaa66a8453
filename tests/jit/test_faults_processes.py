"""The kernel cache among processes: races, and processes killed at any point."""

import logging
import threading
import time
from pathlib import Path

import pytest
from tests.jit.cache_parts import BINARY, Builds, Gate, die, finish, key, start

from tilewright.jit import cache, store
from tilewright.jit.cache import Built
from tilewright.jit.lock import KeyLock

PROCESSES = 16


def never() -> Built:
    raise AssertionError("this must not be compiled")


def test_16_processes_on_a_cold_cache_compile_each_kernel_once(kernels, tmp_path):
    names = [f"kernel{i}" for i in range(4)]
    builds = {}
    for name in names:
        (tmp_path / name).mkdir()
        builds[name] = Builds(tmp_path / name, name.encode() * 1000)
    gate = Gate()

    def work(number: int) -> None:
        gate.wait()
        first = number % len(names)  # they meet at every key
        for name in names[first:] + names[:first]:

            def slow(name=name):
                time.sleep(0.1)
                return builds[name]()

            assert cache.get(key(name), slow).binary == name.encode() * 1000

    children = [start(lambda number=number: work(number)) for number in range(PROCESSES)]
    gate.open(PROCESSES)
    assert [finish(child) for child in children] == [0] * PROCESSES
    assert {name: build.count for name, build in builds.items()} == dict.fromkeys(names, 1)
    assert cache.info().entries == len(names)
    assert list((kernels / ".tmp").iterdir()) == []


def _die_in_build() -> Built:
    die()
    raise AssertionError


def _dying_write(after: int):
    written, write = [], store._write

    def dying(path: Path, data: bytes) -> None:
        if len(written) == after:
            path.write_bytes(data[: len(data) // 2])  # killed half way through a file
            die()
        write(path, data)
        written.append(path)

    return dying


@pytest.mark.parametrize("point", ["build", "file 0", "file 1", "file 2", "file 3", "before rename", "after rename"])
def test_killed_at_any_point_leaves_nothing_broken(kernels, tmp_path, monkeypatch, point):
    build = Builds(tmp_path)
    rename = Path.rename

    def killed() -> None:
        if point.startswith("file"):
            monkeypatch.setattr(store, "_write", _dying_write(int(point[-1])))
        elif point.endswith("rename"):

            def dying(path: Path, target: Path) -> None:
                if point.startswith("after"):
                    rename(path, target)
                die()

            monkeypatch.setattr(Path, "rename", dying)
        cache.get(key(), _die_in_build if point == "build" else build)

    assert finish(start(killed)) == -9
    if point.startswith(("file", "before")):
        assert len(list((kernels / ".tmp").iterdir())) == 1
    published = point == "after rename"
    assert (cache.find(key()) is not None) == published
    assert cache.get(key(), build).binary == BINARY
    assert build.count == (1 if point in ("build", "after rename") else 2)
    assert published or list((kernels / ".tmp").iterdir()) == []  # swept by the next builder
    cache.forget()
    assert cache.get(key(), never).binary == BINARY


def test_killed_while_removing_leaves_the_entry_whole_or_gone(kernels, tmp_path, monkeypatch):
    cache.get(key(), Builds(tmp_path))

    def killed() -> None:
        monkeypatch.setattr(store.shutil, "rmtree", lambda *_, **__: die())
        cache.clear()

    assert finish(start(killed)) == -9
    cache.forget()
    assert cache.find(key()) is None
    cache.get(key(), Builds(tmp_path))
    assert list((kernels / ".tmp").iterdir()) == []


def test_what_a_living_process_writes_is_not_swept(kernels, tmp_path, monkeypatch):
    half_way, go_on = Gate(), Gate()
    write = store._write

    def slow(path: Path, data: bytes) -> None:
        write(path, data)
        half_way.open()
        go_on.wait()

    def work() -> None:
        monkeypatch.setattr(store, "_write", slow)
        assert cache.get(key(), Builds(tmp_path)).path is not None

    child = start(work)
    half_way.wait()
    cache.get(key("other"), Builds(tmp_path))  # sweeps before it publishes
    assert len(list((kernels / ".tmp").iterdir())) == 1
    go_on.open(4)
    assert finish(child) == 0
    assert cache.get(key(), never).binary == BINARY


def test_who_waits_says_so_once_and_takes_the_result(kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "_LOG_AFTER_SECONDS", 0.05)
    building = Gate()

    def slow() -> Built:
        building.open()
        time.sleep(0.4)
        return Built(b"theirs", {})

    child = start(lambda: cache.get(key(), slow))
    building.wait()
    assert cache.get(key(), never).binary == b"theirs"
    assert finish(child) == 0
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["waiting for another process that compiles copy for sm_90a"]


def test_what_was_published_just_before_the_lock_was_free_is_taken(kernels, tmp_path, monkeypatch):
    """Between our look at the disk and our lock, another process may build and let go: look again."""
    take, others = KeyLock.take, []

    def late(lock: KeyLock, wait: float = 0.0) -> bool:
        if not others:
            others.append(None)
            assert finish(start(lambda: cache.get(key(), Builds(tmp_path)))) == 0
        return take(lock, wait)

    monkeypatch.setattr(KeyLock, "take", late)
    assert cache.get(key(), never).binary == BINARY
    assert others


def test_a_long_build_is_logged(kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "_LOG_AFTER_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "tilewright"):
        cache.get(key(), Builds(tmp_path))
    assert "compiled copy for sm_90a in 0.0 s" in caplog.text


def test_who_loses_patience_builds_its_own_and_both_end_well(kernels, tmp_path, monkeypatch, caplog):
    """A holder that hangs, or a file system that forgets a lock: two builders, and the slower one loses the race."""
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_SECONDS", 0.05)
    building, go_on = Gate(), Gate()

    def hangs() -> Built:
        building.open()
        go_on.wait()
        return Built(b"theirs", {})

    def work() -> None:
        found = cache.get(key(), hangs)
        assert found.binary == found.path.read_bytes() == b"ours"  # the loser takes the winner's

    child = start(work)
    building.wait()
    assert cache.get(key(), lambda: Built(b"ours", {})).binary == b"ours"
    assert "compiling copy in this process too" in caplog.text
    go_on.open()
    assert finish(child) == 0
    assert cache.info().entries == 1


def test_a_failed_build_lets_the_next_process_try(kernels, tmp_path):
    building, go_on = Gate(), Gate()

    def fails() -> Built:
        building.open()
        go_on.wait()
        raise RuntimeError("this compiler was killed by its user")

    def work() -> None:
        with pytest.raises(RuntimeError):
            cache.get(key(), fails)

    child = start(work)
    building.wait()
    threading.Timer(0.1, go_on.open).start()
    build = Builds(tmp_path)
    assert cache.get(key(), build).binary == BINARY
    assert build.count == 1
    assert finish(child) == 0


def test_a_process_forked_during_a_build_does_not_inherit_it(kernels, tmp_path):
    """The building thread does not exist in the child, and its lock must not either."""
    building, go_on = threading.Event(), threading.Event()

    def slow() -> Built:
        building.set()
        go_on.wait()
        return Built(b"theirs", {})

    thread = threading.Thread(target=lambda: cache.get(key(), slow))
    thread.start()
    building.wait()
    process = cache._state()

    def work() -> None:
        cache._process = process  # `start` gives a child an empty one; this child keeps what fork left it
        assert not cache._state().locks
        assert cache.get(key("other"), Builds(tmp_path)).binary == BINARY
        assert cache.get(key(), never).binary == b"theirs"

    child = start(work)
    go_on.set()
    thread.join()
    assert finish(child) == 0


def test_every_process_may_replace_an_entry_while_others_read_it(kernels, tmp_path, monkeypatch):
    """Readers see the old entry or the new one; no reader takes a replaced entry for a damaged one."""
    monkeypatch.setenv("TILEWRIGHT_JIT_REBUILD", "1")
    gate = Gate()

    def make(number: int) -> Built:
        return Built(bytes([number]) * 50_000, {"number": number})

    def write(number: int) -> None:
        gate.wait()
        for turn in range(10):
            cache.forget()
            cache.get(key(), lambda turn=turn: make(number + turn))

    def read() -> None:
        gate.wait()
        for _ in range(100):
            cache.forget()
            found = cache.find(key())
            if found is not None:
                assert found.binary == make(found.info["number"]).binary

    cache.settings.reload()
    children = [start(lambda number=n: write(20 * number)) for n in range(3)] + [start(read) for _ in range(3)]
    gate.open(6)
    assert [finish(child) for child in children] == [0] * 6
    assert cache.find(key()) is not None
