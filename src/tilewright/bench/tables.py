"""Write what a run measured as a tuning table: the file that `auto` reads."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.bench.schema import Results
from tilewright.dispatch import table
from tilewright.errors import InputError
from tilewright.settings import current

_KEY = ("op", "direction", "bucket", "dtype", "numerics")


def write_table(results: Results, path: Path | None = None) -> Path:
    """Merge the fastest implementation of every case into the table at `path`, by default the user's of this device.

    Where two cases share a bucket, the one measured first stays. Rows of the file that this run did not measure are
    kept when they are of the same device, torch and Triton. Raises InputError for results without choices (loaded
    from JSON) or with failures. Returns the path.
    """
    if not results.ok:
        failed = "; ".join(f"{n.op} {n.case} {n.name}: {n.reason}" for n in results.failures[:3])
        raise InputError(
            f"write_table: the run has {len(results.failures)} failures and is not to be trusted: {failed}"
        )
    if not results.choices:
        raise InputError("write_table: no measured choices; a table is written from a run, not from a result file")
    machine = results.machine
    target = path or current().cache_dir / "tables" / f"{_slug(machine['device'])}.json"
    header = {
        "schema": table.SCHEMA,
        "gpu": machine["device"],
        "arch": machine["arch"],
        "sm_count": machine["sm_count"],
        "versions": {"torch": machine["torch"], "triton": machine["triton"], "driver": machine["driver"]},
        "date": machine["date"][:10],
    }
    measured: dict[tuple[str, ...], dict[str, Any]] = {}
    for item in results.choices:
        row = {**asdict(item), "numerics": "default"}
        measured.setdefault(tuple(row[name] for name in _KEY), row)
    merged = {**_kept(target, header), **measured}
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(merged[key]) for key in sorted(merged))
    head = json.dumps(header, indent=1).removesuffix("\n}")
    target.write_text(f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')
    table.forget()
    return target


def _kept(path: Path, header: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    if not path.exists():
        return {}
    old, _ = table.read(path)
    if (old["gpu"], old["versions"]) != (header["gpu"], header["versions"]):
        return {}
    return {tuple(row[name] for name in _KEY): row for row in old["rows"]}


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
