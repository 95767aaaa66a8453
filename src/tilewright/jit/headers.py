"""One hash over all headers that a source includes, so that editing a header rebuilds its users.

Only headers in the given folders count: system and toolkit headers belong to the compiler's version.  The hash covers
spelled names and contents, not the paths of the folders.  Conditions are not evaluated: an include inside `#if`, or in
a block comment, counts too, which at worst costs a rebuild.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


class _Header(NamedTuple):
    state: tuple[int, int, int]  # changes when the file does
    digest: bytes
    includes: list[tuple[bool, str]]  # (quoted, name)


_headers: dict[Path, _Header] = {}


def header_hash(source: str, include_dirs: Sequence[Path]) -> str:
    """Hash of all headers that `source` includes, directly or not; "" if it includes none of ours.

    `"name"` is searched next to the including header, then in `include_dirs` in order; `<name>` only in the latter.
    """
    hashed = hashlib.sha256()
    visited: set[Path] = set()
    pending = [(name, tuple(include_dirs)) for _, name in reversed(_includes(source.encode()))]
    while pending:
        name, folders = pending.pop()
        path = _find(name, folders)
        if path is None or path in visited:
            continue
        visited.add(path)
        header = _read(path)
        hashed.update(b"%s\0%s" % (name.encode(), header.digest))
        pending += [
            (n, (path.parent, *include_dirs) if quoted else tuple(include_dirs))
            for quoted, n in reversed(header.includes)
        ]
    return hashed.hexdigest() if visited else ""


def _includes(text: bytes) -> list[tuple[bool, str]]:
    return [(bool(quoted), os.fsdecode(quoted or angled)) for quoted, angled in _INCLUDE.findall(text)]


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        path = Path(os.path.normpath(folder / name))  # so that a/../a/x.h is a/x.h, and cyclic includes end
        if path.is_file():
            return path
    return None


def _read(path: Path) -> _Header:
    stat = path.stat()
    state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    header = _headers.get(path)
    if header is None or header.state != state:
        text = path.read_bytes()
        header = _headers[path] = _Header(state, hashlib.sha256(text).digest(), _includes(text))
    return header
