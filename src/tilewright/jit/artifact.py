"""The data of the kernel cache: the key of a build, a compiler's result, and the cached binary."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewright.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9_]+")
_SUFFIX = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class BuildKey:
    """Everything that decides the bytes of a binary, and nothing else: two machines with equal keys may share it.

    `flags` must not contain paths of an installation; `headers` holds a hash of the headers' contents.
    """

    name: str  # of the kernel; readable, not unique
    kind: str  # "cuda", "cutile", "triton" or "host": the family of compilers
    arch: str  # "sm_90a", "gfx942", "x86-64-v4"
    flags: tuple[str, ...]
    source: str = field(repr=False)  # the compiled text
    headers: str = ""  # headers.header_hash(source, include_dirs)
    compiler: str = ""  # "nvrtc 13.0.88"; "" if no such compiler is installed
    suffix: str = "cubin"  # of the binary: "cubin", "so", "hsaco"
    source_suffix: str = "cu"  # of the source: "cu", "cpp", "py"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"kernel name {self.name!r}: allowed are letters, digits and underscores.")
        for suffix in (self.suffix, self.source_suffix):
            if not _SUFFIX.fullmatch(suffix):
                raise InputError(f"{self.name}: suffix {suffix!r}: allowed are lower-case letters and digits.")

    @cached_property
    def request(self) -> str:
        """Digest of all fields but `compiler`: equal for any compiler of the kind."""
        hashed = hashlib.sha256()
        for part in (
            *(self.name, self.kind, self.arch, self.suffix, self.source_suffix, self.headers, self.source),
            *self.flags,
        ):
            encoded = part.encode()
            hashed.update(b"%d:" % len(encoded))  # with its length, so that no two lists of parts hash the same bytes
            hashed.update(encoded)
        return hashed.hexdigest()

    @cached_property
    def digest(self) -> str:
        """Digest of all fields."""
        return hashlib.sha256(f"{self.request} {self.compiler}".encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of this key's folder on disk."""
        return self.family + hashlib.sha256(self.compiler.encode()).hexdigest()[:8]

    @property
    def family(self) -> str:
        """The common prefix of this request's folders, one per compiler."""
        return f"{self.name}-{self.request[:16]}-"


class Built(NamedTuple):
    """A compiler's result."""

    binary: bytes
    info: dict[str, Any]  # JSON: symbol, registers, spills, and what a launch needs
    files: Mapping[str, bytes] = MappingProxyType({})  # stored next to the binary, by suffix: {"ptx": ...}


@dataclass(frozen=True)
class Artifact:
    """A binary and the facts about it.

    path: the binary's file; None if the disk cannot be used.  Another process may remove or replace it later, so a
    loader that needs a file writes `binary`, which was verified, to a private one.
    """

    key: BuildKey
    binary: bytes = field(repr=False)
    info: Mapping[str, Any]
    path: Path | None
