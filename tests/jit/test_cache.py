"""The kernel cache: what makes a key, where a binary comes from, and what lies on disk."""

import json
import os
import threading
import time
from dataclasses import replace

import pytest
from tests.harness.counted import calls_during
from tests.jit.cache_parts import BINARY, Builds, key

from tilewright import settings
from tilewright.errors import BackendError, InputError
from tilewright.jit import cache
from tilewright.jit.cache import Built


def never() -> Built:
    raise AssertionError("this must not be compiled")


# ------------------------------------------------------------------------------------------------------------------ key


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "copy2"},
        {"kind": "host"},
        {"arch": "sm_100a"},
        {"flags": ("-O3", "-G")},
        {"source": "__global__ void copy() { }\n"},
        {"headers": "abc"},
        {"suffix": "so"},
        {"source_suffix": "cpp"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_decides_the_binary_changes_the_key(changed):
    one, other = key(), replace(key(), **changed)
    assert one.request != other.request
    assert one.digest != other.digest
    assert one.folder != other.folder


def test_the_compiler_changes_the_key_and_not_the_request():
    one, other = key(), key(compiler="nvrtc 13.1.0")
    assert one.request == other.request
    assert one.digest != other.digest
    assert one.folder != other.folder


def test_parts_of_a_key_do_not_run_together():
    assert key(flags=("-a", "-b")).request != key(flags=("-a-b",)).request
    assert key(headers="ab", source="c").request != key(headers="a", source="bc").request


@pytest.mark.parametrize("changed", [{"name": "../copy"}, {"name": ""}, {"suffix": "../so"}, {"source_suffix": "c/u"}])
def test_names_that_could_leave_the_folder_are_refused(changed):
    with pytest.raises(InputError, match="allowed are"):
        replace(key(), **changed)


# -------------------------------------------------------------------------------------------------------------- lookup


def test_compiled_once_then_from_memory_then_from_disk(kernels, tmp_path):
    build = Builds(tmp_path)
    first = cache.get(key(), build)
    assert cache.get(key(), build) is first
    cache.forget()
    again = cache.get(key(), build)
    assert build.count == 1
    assert (again.binary, again.info, again.path) == (first.binary, first.info, first.path)
    assert again.binary == again.path.read_bytes() == BINARY


def test_threads_that_open_the_cache_together_share_one_memory(kernels, monkeypatch):
    opened = []

    class Slow(cache._Process):
        def __init__(self, folder):
            opened.append(folder)
            time.sleep(0.1)
            super().__init__(folder)

    monkeypatch.setattr(cache, "_Process", Slow)
    cache.forget()
    found, together = [], threading.Barrier(4)

    def work():
        together.wait(timeout=60)
        found.append(cache._state())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(opened) == 1
    assert len(found) == 4 and len(set(map(id, found))) == 1


def test_an_entry_is_readable(kernels, tmp_path):
    made = cache.get(key(), Builds(tmp_path))
    assert made.path.parent.parent == kernels
    assert made.path.parent.name == key().folder
    assert {f.name for f in made.path.parent.iterdir()} == {"kernel.cu", "kernel.cubin", "kernel.ptx", "entry.json"}
    assert (made.path.parent / "kernel.cu").read_text() == key().source
    described = json.loads((made.path.parent / "entry.json").read_text())
    assert described["flags"] == ["-O3"]
    assert described["compiler"] == "nvrtc 13.0.88"
    assert described["info"] == {"symbol": "copy", "registers": 32}


def test_who_builds_sees_the_info_that_others_will_read(kernels):
    made = cache.get(key(), lambda: Built(b"x", {"block": (128, 1, 1), "names": {1: "a"}}))
    cache.forget()
    assert made.info == cache.get(key(), never).info == {"block": [128, 1, 1], "names": {"1": "a"}}


def test_another_compiler_version_builds_its_own(kernels, tmp_path):
    build = Builds(tmp_path)
    cache.get(key(), build)
    cache.get(key(compiler="nvrtc 13.1.0"), build)
    assert build.count == 2
    assert cache.info().entries == 2


def test_find_never_builds_and_never_takes_another_compilers(kernels, tmp_path):
    assert cache.find(key()) is None
    cache.get(key(), Builds(tmp_path))
    cache.forget()
    assert cache.find(key()).binary == BINARY
    assert cache.find(key(compiler="nvrtc 13.1.0")) is None
    assert cache.find(key(compiler="")).binary == BINARY


def test_a_failed_build_leaves_nothing_and_may_be_tried_again(kernels, tmp_path):
    def fails():
        raise BackendError("line 3: expected a ';'")

    with pytest.raises(BackendError, match="expected a ';'"):
        cache.get(key(), fails)
    assert list(cache.entries()) == []
    assert cache.get(key(), Builds(tmp_path)).binary == BINARY


def test_an_extra_file_cannot_take_the_binarys_place(kernels):
    for suffix in ("cubin", "cu", "../ptx"):
        with pytest.raises(InputError, match="take another suffix"):
            cache.get(key(), lambda suffix=suffix: Built(b"x", {}, {suffix: b"y"}))


def test_without_a_compiler_the_newest_of_any_compiler_serves(kernels):
    for version in ("13.0", "12.9", "13.1"):  # 13.1 was built last
        cache.get(key(compiler=f"nvrtc {version}"), lambda version=version: Built(version.encode(), {}))
    cache.forget()
    assert cache.get(key(compiler=""), never).binary == b"13.1"
    assert cache.get(key(compiler="nvrtc 14.0"), None).binary == b"13.1"
    assert cache.get(key(compiler="nvrtc 12.9"), None).binary == b"12.9"


def test_without_a_compiler_and_an_entry_it_says_what_to_do(kernels):
    with pytest.raises(BackendError) as raised:
        cache.get(key(compiler=""), never)
    text = str(raised.value)
    assert str(kernels) in text
    assert "pip install 'tilewright[cuda]'" in text
    assert "tilewright warmup --arch sm_90a --out kernels.zip" in text
    assert "tilewright cache import kernels.zip" in text


def test_a_bundle_that_comes_later_is_found(kernels, tmp_path):
    with pytest.raises(BackendError):
        cache.get(key(compiler=""), None)
    cache.get(key(), Builds(tmp_path))
    assert cache.get(key(compiler=""), None).binary == BINARY


def test_another_cache_folder_is_another_cache(kernels, tmp_path, monkeypatch):
    build = Builds(tmp_path)
    cache.get(key(), build)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "second"))
    settings.reload()
    assert cache.get(key(), build).path.is_relative_to(tmp_path / "second")
    assert build.count == 2


def test_rebuild_compiles_again_once_a_process(kernels, tmp_path, monkeypatch):
    cache.get(key(), lambda: Built(b"old", {}))
    cache.forget()
    monkeypatch.setenv("TILEWRIGHT_JIT_REBUILD", "1")
    settings.reload()
    build = Builds(tmp_path)
    for _ in range(3):
        assert cache.get(key(), build).binary == BINARY
    assert build.count == 1
    monkeypatch.delenv("TILEWRIGHT_JIT_REBUILD")
    settings.reload()
    cache.forget()
    assert cache.get(key(), never).binary == BINARY


def test_threads_build_a_key_once(kernels, tmp_path):
    build, results = Builds(tmp_path), []
    barrier = threading.Barrier(8)

    def slow():
        time.sleep(0.05)
        return build()

    def work():
        barrier.wait()
        results.append(cache.get(key(), slow))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.count == 1
    assert len({id(result) for result in results}) == 1


# ------------------------------------------------------------------------------------------------------------- upkeep


def test_info_counts_by_kind(kernels, tmp_path):
    build = Builds(tmp_path)
    cache.get(key(), build)
    cache.get(key("add", kind="host", suffix="so"), build)
    cache.get(key("mul", kind="host", suffix="so"), build)
    found = cache.info()
    assert found.folder == kernels
    assert found.writable
    assert {kind: count for kind, (count, _) in found.kinds.items()} == {"cuda": 1, "host": 2}
    sizes = sum(f.stat().st_size for f in kernels.rglob("*") if f.is_file())
    assert found.bytes == sizes == sum(entry.size for entry in cache.entries())


def test_clear_by_kind_by_age_and_all(kernels, tmp_path):
    build = Builds(tmp_path)
    for name, kind in (("a", "cuda"), ("b", "cuda"), ("c", "host")):
        cache.get(key(name, kind=kind), build)
    assert cache.clear(older_than=60) == 0
    assert cache.clear(kind="host") == 1
    assert [entry.name for entry in cache.entries()] == ["a", "b"]
    (kernels / key("d").folder).mkdir()  # a folder without entry.json
    assert cache.clear() == 3
    assert [f for f in kernels.rglob("*") if not f.is_dir()] == []
    cache.get(key("a"), build)
    assert build.count == 4


def test_clear_leaves_what_is_not_ours(kernels, tmp_path):
    cache.get(key(), Builds(tmp_path))
    (kernels / "notes").mkdir()
    assert cache.clear() == 1
    assert (kernels / "notes").is_dir()


# --------------------------------------------------------------------------------------------------------------- costs


def test_a_memory_hit_is_a_few_look_ups(kernels, tmp_path):
    wanted, build = key(), Builds(tmp_path)
    cache.get(wanted, build)
    assert calls_during(lambda: cache.get(wanted, build)) <= 10


def test_a_disk_hit_reads_two_files_once(kernels, tmp_path, monkeypatch):
    cache.get(key(), Builds(tmp_path, bytes(100_000)))
    opened = []

    def noted(path, *rest, own=os.open, **options):
        if "dir_fd" in options:  # a file of the entry
            opened.append(path)
        return own(path, *rest, **options)

    monkeypatch.setattr(os, "open", noted)

    def load():
        cache.forget()
        cache.get(key(), None)

    load()
    assert sorted(opened) == ["entry.json", "kernel.cubin"]
    assert calls_during(load) <= 400
