"""`entry.json`: the description of one cached kernel, with checksums of all its files and of itself."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import CorruptError, InputError
from tilewright.jit.artifact import BuildKey, Built
from tilewright.version import __version__

SCHEMA = 1
FILE = "entry.json"
FOLDER = re.compile(r"[A-Za-z0-9_]+-[0-9a-f]{16}-[0-9a-f]{8}")  # <name>-<request>-<compiler>

_NAME = re.compile(r"kernel\.[A-Za-z0-9_.-]+")
_HEAD = '{\n "check": "'
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "kind", "arch", "compiler", "request", "folder", "binary", "source", "headers"), str),
    "created": (int, float),
    "info": dict,
    "files": dict,
    "flags": list,
}


def compose(key: BuildKey, built: Built) -> dict[str, bytes]:
    """Every file of an entry by name, `entry.json` last."""
    contents = {f"kernel.{key.source_suffix}": key.source.encode(), f"kernel.{key.suffix}": built.binary}
    for suffix, data in built.files.items():
        name = f"kernel.{suffix}"
        if not _NAME.fullmatch(name) or name in contents:
            raise InputError(f"{key.name}: an extra file cannot be called {name!r}; take another suffix.")
        contents[name] = data
    described = {
        "schema": SCHEMA,
        "tilewright": __version__,
        "created": time.time(),
        **{field: getattr(key, field) for field in ("name", "kind", "arch", "flags", "headers", "compiler", "request")},
        "folder": key.folder,
        "binary": f"kernel.{key.suffix}",
        "source": f"kernel.{key.source_suffix}",
        "info": built.info,
        "files": {name: checksum(data) for name, data in contents.items()},
    }
    # The checksum comes first and covers the text after it, so a reader need not serialise again
    rest = json.dumps(described, indent=1)[1:]
    contents[FILE] = f'{_HEAD}{checksum(rest.encode())}",{rest}\n'.encode()
    return contents


def parse(text: bytes) -> dict[str, Any]:
    """The description in `entry.json`.  Raises CorruptError."""
    start, end = len(_HEAD), len(_HEAD) + 64
    try:
        decoded = text.decode()
        entry = json.loads(decoded)
    except ValueError as error:
        raise CorruptError(f"{FILE} is not JSON") from error
    if not decoded.startswith(_HEAD) or decoded[start:end] != checksum(decoded[end + 2 : -1].encode()):
        raise CorruptError(f"{FILE} differs from its checksum")
    if entry.get("schema") != SCHEMA:
        raise CorruptError(f"{FILE} has schema {entry.get('schema')!r}, this version reads {SCHEMA}")
    wrong = [name for name, kind in _TYPES.items() if not isinstance(entry.get(name), kind)]
    if wrong:
        raise CorruptError(f"{FILE}: {', '.join(wrong)} absent or of another type")
    return dict(entry)


def read(folder: Path) -> dict[str, Any]:
    """The description of the entry in `folder`.  Raises CorruptError, and OSError if it cannot be read."""
    return parse((folder / FILE).read_bytes())


def check(folder: str, contents: Mapping[str, bytes]) -> None:
    """Raise CorruptError unless `contents` are exactly the files of the entry `folder`, intact and with its key."""
    if FILE not in contents:
        raise CorruptError(f"{FILE} is missing")
    entry = parse(contents[FILE])
    for name in sorted({FILE, *entry["files"]} ^ set(contents)):
        raise CorruptError(f"{name} is {'unknown' if name in contents else 'missing'}")
    for name, expected in entry["files"].items():
        if not _NAME.fullmatch(name) or checksum(contents[name]) != expected:
            raise CorruptError(f"{name} differs from its checksum")
    if entry["binary"] not in contents or entry["source"] not in contents:
        raise CorruptError(f"{FILE} names no source and binary")
    try:
        key = BuildKey(
            **{field: entry[field] for field in ("name", "kind", "arch", "headers", "compiler")},
            flags=tuple(map(str, entry["flags"])),
            source=contents[entry["source"]].decode(),
            suffix=entry["binary"].removeprefix("kernel."),
            source_suffix=entry["source"].removeprefix("kernel."),
        )
    except ValueError as error:
        raise CorruptError(f"{FILE} describes no kernel: {error}") from error
    if (key.folder, key.request) != (folder, entry["request"]):
        raise CorruptError(f"{folder} is not the place of what it holds")


def checksum(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
