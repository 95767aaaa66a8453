"""What compiled kernels cost, written down: registers, spills, shared memory and matrix instructions, per kernel.

`tests/compile/resources/<backend>/<family>.json` is committed, so that a change of a kernel shows what it did to every
GPU we compile for, and an unintended change fails.  `scripts/update_resources.py` writes the files.

A run with `--exhaustive` compiles every form of a kernel, and its costs are compared exactly.  A run without it
compiles a part of them: no number may exceed the ledger's, and no kernel or matrix instruction may be unknown to it.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent.parent / "compile" / "resources"
DRAFTS = Path(__file__).parents[2] / "build" / "resources"
UPDATE = "TILEWRIGHT_UPDATE_RESOURCES"


class Usage(NamedTuple):
    """One binary.  registers: per thread.  spilled: registers or bytes, as the compiler counts.  shared_bytes: static
    and, for Triton, dynamic.  matrix: names of matrix and tensor-copy instructions.
    """

    kernel: str
    registers: int
    spilled: int
    shared_bytes: int
    matrix: tuple[str, ...]


COLUMNS = ("binaries", *Usage._fields[1:])


def summary(usages: Iterable[Usage]) -> dict[str, list[Any]]:
    """Per kernel, by COLUMNS: how many binaries, the largest of each number, every matrix instruction."""
    found: dict[str, list[Usage]] = {}
    for usage in usages:
        found.setdefault(usage.kernel, []).append(usage)
    return {
        name: [
            len(group),
            max(u.registers for u in group),
            max(u.spilled for u in group),
            max(u.shared_bytes for u in group),
            sorted({m for u in group for m in u.matrix}),
        ]
        for name, group in sorted(found.items())
    }


def check(
    backend: str, compiler: str, family: str, key: str, arch: str, usages: Iterable[Usage], *, whole: bool = True
) -> None:
    """Compare with the ledger; with TILEWRIGHT_UPDATE_RESOURCES=1 note what it shall say.

    compiler: name and version, "triton 3.6.0"; under another version than the ledger's nothing is compared.
    whole: `usages` are all that the ledger summarises, rather than a part.
    """
    found = summary(usages)
    if os.environ.get(UPDATE) == "1":
        assert whole, "a ledger is made of every form: pass --exhaustive"
        DRAFTS.mkdir(parents=True, exist_ok=True)
        made = {"key": key, "arch": arch, "columns": COLUMNS, "kernels": found}
        draft = {"backend": backend, "family": family, "compiler": compiler, **made}
        (DRAFTS / f"{backend}-{key}-{arch}.json").write_text(json.dumps(draft))
        return
    file = FOLDER / backend / f"{family}.json"
    empty: dict[str, Any] = {
        "compiler": compiler,
        "columns": list(COLUMNS),
        "kernels": {},
    }  # of the first kernel of a family
    ledger = json.loads(file.read_text()) if file.exists() else empty
    if ledger["compiler"] != compiler:
        return
    known = ledger["kernels"].get(f"{key} {arch}")
    assert list(COLUMNS) == ledger["columns"]
    differs = found != known if whole else bool(excess(found, known or {}))
    assert not differs, (
        f"{key} on {arch} does not cost what {file.relative_to(FOLDER.parents[2])} says: {found}, not {known}; "
        "if that is meant, run scripts/update_resources.py and commit the difference"
    )


def excess(part: Mapping[str, Sequence[Any]], whole: Mapping[str, Sequence[Any]]) -> list[str]:
    """Kernels of `part`, a summary, that cannot be among those that `whole` summarises."""
    return [
        name
        for name, (*numbers, matrix) in part.items()
        if name not in whole
        or any(number > most for number, most in zip(numbers, whole[name][:-1], strict=True))
        or not set(matrix) <= set(whole[name][-1])
    ]
