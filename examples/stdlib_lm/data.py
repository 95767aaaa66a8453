"""The corpus: Python's own standard library, read where it is installed and split by the hash of each file.

The hash decides, so the split is the same on every machine, needs no list, and survives renames; two copies of one
file can never stand on both sides. Three parts: `train`, `validation` (chooses the checkpoint) and `held_out` (touched
once, by the reported perplexity and the demo prompts).
"""

import hashlib
import io
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = ("train", "validation", "held_out")
HELD_OUT_BELOW = 13  # first byte of the sha256: 13/256 = 5.1 % of the files
VALIDATION_BELOW = 26  # and the next 5.1 %

# Tests outweigh the library and repeat its phrases; `encodings` is near copies of a few templates, which would put
# almost the same text on both sides of the split; the rest is not the standard library.
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}

# Share of the non-blank lines from which a file is a table: locale.py has 0.55, html/entities.py 0.99; mimetypes.py and
# opcode.py, which have code around their tables, 0.37.
TABLE_SHARE = 0.45


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    Attributes:
        path: Place below the library's root, with forward slashes.
        sha256: Of the bytes on disk, so that `sha256sum -c` can check a list of files.
        text: Decoded as Python itself would decode it, lines ending in a single newline.
    """

    path: str
    sha256: str
    text: str


def stdlib_root() -> Path:
    """The folder of the running interpreter's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def part_of(sha256: str) -> str:
    """The part, one of PARTS, that a file with this hash (hex digits) belongs to."""
    first = int(sha256[:2], 16)
    if first < HELD_OUT_BELOW:
        return "held_out"
    return "validation" if first < VALIDATION_BELOW else "train"


def is_table(text: str) -> bool:
    """Whether a file is mostly rows of literals (generated tables): many bytes, no language to learn."""
    lines = [line.lstrip(" ([{") for line in text.splitlines() if line.strip()]
    rows = sum(line[:1].isdigit() or (line[:1] in {"'", '"'} and line[:3] not in {"'''", '"""'}) for line in lines)
    return rows > TABLE_SHARE * len(lines)


def collect(root: Path) -> list[SourceFile]:
    """Read every usable `*.py` below `root`, in path order.

    Left out: the folders above, empty files, tables, second copies, and files that are not valid text in the encoding
    they declare (the library itself has none; another tree may).
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(place.parts):
            continue
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        text = _decode(content)
        if text is None or not text.strip() or sha256 in seen or is_table(text):
            continue
        seen.add(sha256)
        files.append(SourceFile(place.as_posix(), sha256, text))
    return files


def _decode(content: bytes) -> str | None:
    """Text of a Python source file by its own encoding declaration, or None if it does not keep to it."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split(files: Iterable[SourceFile]) -> dict[str, list[SourceFile]]:
    """Files by part; every part must have at least one."""
    parts: dict[str, list[SourceFile]] = {name: [] for name in PARTS}
    for file in files:
        parts[part_of(file.sha256)].append(file)
    empty = [name for name, members in parts.items() if not members]
    if empty:
        raise ValueError(
            f"the corpus has no file for {', '.join(empty)}: {sum(map(len, parts.values()))} usable files are too few "
            "to split by hash; give a folder with at least about 100 Python files"
        )
    return parts


def byte_count(files: Iterable[SourceFile]) -> int:
    """UTF-8 bytes of the texts."""
    return sum(len(file.text.encode()) for file in files)


def hash_lines(files: Iterable[SourceFile]) -> str:
    """The lines `sha256sum` prints: `sha256sum -c` on them in a library's folder tells whether it is the same one."""
    return "".join(f"{file.sha256}  {file.path}\n" for file in files)


def fingerprint(files: Iterable[SourceFile]) -> str:
    """One hash for a whole corpus: sha256 of its hash lines."""
    return hashlib.sha256(hash_lines(files).encode()).hexdigest()


def prompts(files: list[SourceFile], count: int, shortest: int, longest: int) -> list[dict[str, str]]:
    """Choose `count` excerpts of whole lines, `shortest` to `longest` bytes each, from as many files as possible.

    Files that name another copyright holder than the Python Software Foundation are passed over, so that one licence
    notice covers all excerpts. The order is by hash, hence fixed for a corpus and without preference.
    """
    queues: list[list[dict[str, str]]] = []
    for file in sorted(files, key=lambda file: file.sha256):
        if _names_other_owner(file.text):
            continue
        excerpts = sorted(_excerpts(file.text, shortest, longest), key=_text_hash)
        queues.append([{"file": file.path, "sha256": file.sha256, "text": text} for text in excerpts])
    chosen: list[dict[str, str]] = []
    while len(chosen) < count and any(queues):
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:count]


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _names_other_owner(text: str) -> bool:
    lines = (line.lower() for line in text.splitlines())
    return any("copyright" in line and "python software foundation" not in line for line in lines)


def _excerpts(text: str, shortest: int, longest: int) -> Iterator[str]:
    """Cut a text at line starts; an excerpt closes once it is long enough, one that a long line overfills is lost."""
    excerpt, size = "", 0
    for line in text.splitlines(keepends=True):
        added = len(line.encode())
        if size + added > longest:
            excerpt, size = "", 0
        else:
            excerpt, size = excerpt + line, size + added
        if size >= shortest:
            yield excerpt
            excerpt, size = "", 0
