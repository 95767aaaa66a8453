"""What compiled kernels cost, written down: registers, spills, shared memory and matrix instructions, per kernel.

`tests/compile/resources/<backend>.json` is committed, so that a change of a kernel shows what it did to every GPU we
compile for, and a change nobody intended fails.  `scripts/update_resources.py` writes it anew.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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


def summary(usages: Iterable[Usage]) -> dict[str, list[object]]:
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


def check(backend: str, compiler: str, key: str, arch: str, usages: Iterable[Usage]) -> None:
    """Compare with the ledger; with TILEWRIGHT_UPDATE_RESOURCES=1 note what it shall say.

    compiler: name and version, "triton 3.6.0"; under another version than the ledger's nothing is compared.
    """
    found = summary(usages)
    if os.environ.get(UPDATE) == "1":
        DRAFTS.mkdir(parents=True, exist_ok=True)
        made = {"key": key, "arch": arch, "columns": COLUMNS, "kernels": found}
        draft = {"backend": backend, "compiler": compiler, **made}
        (DRAFTS / f"{backend}-{key}-{arch}.json").write_text(json.dumps(draft))
        return
    ledger = json.loads((FOLDER / f"{backend}.json").read_text())
    if ledger["compiler"] == compiler:
        assert (list(COLUMNS), found) == (ledger["columns"], ledger["kernels"].get(f"{key} {arch}")), (
            f"{key} on {arch} does not cost what tests/compile/resources/{backend}.json says; "
            "if that is meant, run scripts/update_resources.py and commit the difference"
        )
