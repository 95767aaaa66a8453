"""A cache folder that somebody else may have written is not loaded from, and a library is the one that was verified."""

import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.jit.cache_parts import BINARY, Builds, key

from tilewright.errors import InputError, KernelMissingError
from tilewright.jit import bundle, cache, host_launch, trust
from tilewright.jit.compilers import get_compiler
from tilewright.jit.compilers.kernel_args import Pointer
from tilewright.jit.host_launch import HostKernel

SOURCE = "namespace tilewright {{ template <class C> void answer(float* y, int threads) {{ *y = {value}.f; }} }}\n"


class Plain(NamedTuple):
    kX: int = 0


class Args(NamedTuple):
    y: Pointer


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(kernels, tmp_path, caplog, mode):
    build = Builds(tmp_path)
    cache.get(key(), build)
    kernels.chmod(mode)
    cache.forget()
    caplog.clear()
    assert cache.find(key()) is None
    again = cache.get(key(), build)
    assert (again.binary, again.path, build.count) == (BINARY, None, 2)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{kernels} is not used: users other than its owner may write it (mode {mode:04o})" in record.message
    assert f"chmod -R go-w {kernels}" in record.message
    with pytest.raises(KernelMissingError):
        cache.get(key("another", compiler=""), None)


def test_a_folder_of_another_user_is_not_used(kernels, tmp_path, caplog, monkeypatch):
    build = Builds(tmp_path)
    cache.get(key(), build)
    give_away(kernels, monkeypatch)
    cache.forget()
    assert cache.get(key(), build).path is None
    assert build.count == 2
    assert "is not used: it belongs to user" in caplog.text


@pytest.mark.parametrize("name", ["", "kernel.cubin", "entry.json"])
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_an_entry_that_others_may_write_is_made_anew(kernels, tmp_path, caplog, monkeypatch, name, how):
    build = Builds(tmp_path)
    folder = cache.get(key(), build).path.parent
    if how == "mode":
        (folder / name).chmod(0o666 if name else 0o777)
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root may give a file away, and without it the whole folder counts as another's")
        os.chown(folder / name, 12345, -1)
    else:
        target = tmp_path / "elsewhere"
        (folder / name).rename(target)
        (folder / name).symlink_to(target)
    cache.forget()
    assert cache.find(key()) is None
    assert cache.get(key(), build).binary == BINARY
    assert build.count == 2


def test_what_the_cache_makes_is_trusted_under_any_umask(kernels, tmp_path):
    before = os.umask(0)
    try:
        cache.get(key(), Builds(tmp_path))
        cache.forget()
        assert cache.find(key()) is not None
        made = [kernels, *kernels.rglob("*")]
        assert len(made) > 5
        assert not [path for path in made if path.suffix != ".lock" and trust.why_not(path.stat())]
    finally:
        os.umask(before)


def test_a_bundle_takes_nothing_from_nor_into_such_a_folder(kernels, tmp_path):
    cache.get(key(), Builds(tmp_path))
    bundle.export(tmp_path / "kernels.zip", cache.entries())
    [entry] = cache.entries()
    (entry.folder / "kernel.cubin").chmod(0o666)
    with pytest.raises(InputError, match="kernel.cubin: users other than its owner may write it"):
        bundle.export(tmp_path / "again.zip", cache.entries())
    kernels.chmod(0o777)
    with pytest.raises(InputError, match="is not used: users other than its owner may write it"):
        bundle.load(tmp_path / "kernels.zip")


@pytest.mark.skipif(get_compiler("host").version() is None, reason=get_compiler("host").install())
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "file"])
def test_the_library_that_was_verified_is_the_one_that_is_opened(kernels, tmp_path, monkeypatch, memory):
    """The file of the cache is replaced after it was read and before it is opened."""
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    made = {}
    for value in (1, 2):
        file = tmp_path / f"answer{value}.cpp"
        file.write_text(SOURCE.format(value=value))
        made[value] = HostKernel(file, "answer", Args), HostKernel(file, "answer", Args).compile(Plain())
    kernel, artifact = made[1]
    artifact.path.write_bytes(made[2][1].binary)
    y = torch.zeros(1)
    kernel._load(artifact)(y.data_ptr(), 1)
    assert y.item() == 1
    libraries = [host_launch._open(found) for _, found in made.values()]
    assert libraries[0]._handle != libraries[1]._handle


def test_an_entry_replaced_while_it_is_read_is_whole_or_refused(kernels, tmp_path):
    """One process swaps the file for another owner's between two looks; what was checked is what is read."""
    folder = cache.get(key(), Builds(tmp_path)).path.parent
    stop = threading.Event()

    def swap() -> None:
        evil, good = tmp_path / "evil", (folder / "kernel.cubin").read_bytes()
        while not stop.is_set():
            evil.write_bytes(b"evil")
            evil.chmod(0o666)
            evil.replace(folder / "kernel.cubin")
            evil.write_bytes(good)
            evil.chmod(0o644)
            evil.replace(folder / "kernel.cubin")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            cache.forget()
            found = cache.find(key())
            assert found is None or found.binary == BINARY
    finally:
        stop.set()
        thread.join()
