"""JSON files of many like rows: the names once, then one line a row, small to commit and readable in a diff.

    {..., "common": {"l2": "cold"}, "columns": ["op", "us", "date"], "rows": [["softmax", 2.1], ["rope", 2.2, "21-11"]]}

What all rows have alike is in `common` alone.  An optional column that a row lacks is null, or left out where nothing
follows; so null is no value of such a column.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def text(head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A file of `head`, whose lists have a line for each item, and of `rows`, whose fields are among `columns`."""
    parts = {name: _lines(value) if isinstance(value, list) else _indented(value) for name, value in head.items()}
    items = list(rows)
    common = _common(items)
    names = [name for name in columns if name not in common]
    parts["common"] = _indented(common)
    parts["columns"] = json.dumps(names)
    parts["rows"] = _lines([_list({k: v for k, v in row.items() if k not in common}, names) for row in items])
    return "{\n" + ",\n".join(f' "{name}": {part}' for name, part in parts.items()) + "\n}\n"


def rows(data: Mapping[str, Any], optional: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a file as dicts, without the `optional` columns that a row lacks.

    Raises ValueError for a row that is no list, or longer than the columns are.
    """
    return [{**data["common"], **_dict(i, row, data["columns"], optional)} for i, row in enumerate(data["rows"])]


def _common(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that several rows, all there are, have alike."""
    if len(rows) < 2:
        return {}
    return {name: value for name, value in rows[0].items() if all(name in r and r[name] == value for r in rows[1:])}


def _lines(items: Iterable[Any]) -> str:
    lines = ",\n  ".join(json.dumps(item, separators=(",", ":")) for item in items)
    return f"[\n  {lines}\n ]" if lines else "[]"


def _indented(value: Any) -> str:
    return json.dumps(value, indent=1).replace("\n", "\n ")


def _list(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    unknown = sorted(set(row) - set(columns))
    if unknown:
        raise ValueError(f"no column for {', '.join(unknown)}.")
    end = max((i for i, name in enumerate(columns, start=1) if name in row), default=0)
    return [row.get(name) for name in columns[:end]]


def _dict(i: int, row: Any, columns: Sequence[str], optional: Collection[str]) -> dict[str, Any]:
    if not isinstance(row, list) or len(row) > len(columns):
        raise ValueError(f"row {i} is no list of at most {len(columns)} values.")
    pairs = zip(columns, row, strict=False)
    return {name: value for name, value in pairs if value is not None or name not in optional}
