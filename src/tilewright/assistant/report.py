"""The report: one JSON document with a schema version, or an HTML page.

`Report.from_json(report.to_json()) == report`. A document of another schema version is refused.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from tilewright.assistant.document import SCHEMA, ChangeRecord, Decision, Document, Kind
from tilewright.assistant.view import html
from tilewright.errors import InputError

__all__ = ["SCHEMA", "ChangeRecord", "Decision", "Kind", "Report"]


@dataclass
class Report(Document):
    """One run of `optimize` (or of `analyze`, which has no control, totals or accuracy)."""

    @staticmethod
    def from_json(text: str) -> Report:
        """Read what `to_json` wrote. Raises InputError for another schema."""
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise InputError(f"this is no report that this version reads: schema {schema!r}, wanted {SCHEMA!r}.")
        return typing.cast(Report, _build(Report, data))

    def save(self, path: str | Path) -> Path:
        """Write the report: a page to a .html file, JSON to a .json file. Raises InputError for other names."""
        target = Path(path)
        if target.suffix not in (".html", ".json"):
            raise InputError(f"{target.name}: a report is saved as .html or .json.")
        if target.suffix == ".html":
            text = html.render(self)
        else:
            text = self.to_json()
        target.write_text(text, encoding="utf-8")
        return target


def _build(kind: Any, value: Any) -> Any:
    """Convert `value`, parsed from JSON, to the annotated type `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        variants = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _build(variants[0], value)
    if origin is list:
        return [_build(arguments[0], item) for item in value]
    if kind is float:
        return math.inf if value is None else float(value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        present = [item.name for item in fields(kind) if item.name in value]  # older documents lack the newer fields
        return kind(**{name: _build(hints[name], value[name]) for name in present})
    return value
