"""A bundle: entries of the kernel cache in one zip file, for a machine that has no compiler.

    manifest.json              {"schema", "tilewright", "created", "entries": {<entry>: SHA-256 of its entry.json}}
    <entry>/kernel.cu ...      the files of an entry as in the cache; entry.json holds their checksums

An import is all or nothing: before the first file is written, every checksum is verified and every key is computed
again from the contents.  A bundle holds machine code that the importing process will run: import one only from a
source whose code you would run.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewright.errors import CorruptError, InputError, UntrustedError
from tilewright.jit import cache, housekeeping, trust
from tilewright.jit import entry as descriptions
from tilewright.jit.housekeeping import Entry
from tilewright.jit.store import Store
from tilewright.settings import current
from tilewright.version import __version__

SCHEMA = 1
_MANIFEST = "manifest.json"
_WAIT_SECONDS = 60.0  # for another process that builds the same entry; after that, the rename decides


def export(path: Path, entries: Iterable[Entry]) -> int:
    """Write `entries` to the bundle `path`; returns their number.

    Raises InputError, and leaves no file, if there are no entries, one is corrupt, or the file cannot be written.
    """
    selected = sorted(entries, key=lambda entry: entry.folder.name)
    if not selected:
        raise InputError(f"{path}: no entry of the kernel cache was chosen, and an empty bundle is useless.")
    partial = path.with_name(f".{path.name}.partial")
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "tilewright": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "entries": {},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry in selected:
                name, contents = entry.folder.name, _read(entry.folder)
                manifest["entries"][name] = descriptions.checksum(contents[descriptions.FILE])
                for file, data in sorted(contents.items()):
                    _add(archive, f"{name}/{file}", data)
            _add(archive, _MANIFEST, json.dumps(manifest, indent=1).encode())
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(selected)


def load(path: Path) -> int:
    """Import the bundle `path` into the cache; returns its number of entries.  Entries that exist already stay.

    Raises InputError with the reason, and writes nothing, if the file is no bundle, has another schema, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            for folder, names in members.items():
                _verified(archive, folder, names, path)
            _store(archive, members, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise InputError(f"{path} is not a bundle, or is damaged: {error}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return len(members)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    # A ZipInfo has a fixed date, so equal entries make equal bytes
    archive.writestr(zipfile.ZipInfo(name), data, compress_type=zipfile.ZIP_DEFLATED)


def _read(folder: Path) -> dict[str, bytes]:
    """Read and verify the files of an entry."""
    try:
        with trust.opened(folder) as opened:
            contents = {name: trust.read(opened, name) for name in trust.names(opened)}
        descriptions.check(folder.name, contents)
    except (CorruptError, UntrustedError, FileNotFoundError) as error:
        raise InputError(f"{folder} cannot be exported: {error}. Remove it and compile it again.") from error
    return contents


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, list[str]]:
    """Check the archive against its manifest; returns entry -> names of its files."""
    try:
        manifest = json.loads(archive.read(_MANIFEST))
        schema, checksums = manifest["schema"], dict(manifest["entries"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a bundle: it has no readable {_MANIFEST}.") from error
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {schema!r}, this version reads {SCHEMA}. Make it again with tilewright {__version__}."
        )
    members: dict[str, list[str]] = {folder: [] for folder in checksums}
    for name in archive.namelist():
        folder, _, file = name.partition("/")
        if name != _MANIFEST and (folder not in members or not file):
            raise InputError(f"{path}: {name} is not in the manifest.")
        if name != _MANIFEST:
            members[folder].append(file)
    for folder, expected in checksums.items():
        if not descriptions.FOLDER.fullmatch(folder):
            raise InputError(f"{path}: {folder!r} is not the name of an entry.")
        if descriptions.FILE not in members[folder]:
            raise InputError(f"{path}: {folder} has no {descriptions.FILE}.")
        if descriptions.checksum(archive.read(f"{folder}/{descriptions.FILE}")) != expected:
            raise InputError(f"{path}: {folder}/{descriptions.FILE} differs from its checksum.")
    return members


def _verified(archive: zipfile.ZipFile, folder: str, names: list[str], path: Path) -> dict[str, bytes]:
    contents = {name: archive.read(f"{folder}/{name}") for name in names}
    try:
        descriptions.check(folder, contents)
    except CorruptError as error:
        raise InputError(f"{path}: {folder}: {error}.") from error
    return contents


def _store(archive: zipfile.ZipFile, members: dict[str, list[str]], path: Path) -> None:
    store = cache.store()
    try:
        for folder, names in members.items():
            lock = store.lock(folder)
            locked = lock.take(_WAIT_SECONDS)
            try:
                if not _is_valid(store, folder):
                    store.put(folder, _verified(archive, folder, names, path), replace=True)
            finally:
                if locked:
                    lock.give()
        housekeeping.shrink(store, current().cache_limit_mb * 2**20, keep=members)
    except OSError as error:
        raise InputError(f"{path}: {store.root} cannot be written: {error.strerror or error}.") from error


def _is_valid(store: Store, folder: str) -> bool:
    try:
        _read(store.root / folder)
    except (InputError, OSError):
        return False
    return True
