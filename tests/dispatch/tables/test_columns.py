"""Rows under one head of names: they survive the disk, and are lines in a diff."""

import json

import pytest

from tilewright.dispatch.tables import columns

NAMES = ("op", "config", "second", "date")
OPTIONAL = ("second", "date")
ROWS = [
    {"op": "a", "config": {"tile": [1]}},
    {"op": "b", "config": {"tile": [1, 2]}, "second": 2.5},
    {"op": "c", "config": None, "date": "2026-11-21"},
]


def test_rows_survive():
    text = columns.text({"schema": 2, "notes": [{"x": 1}], "machine": {"name": "c"}}, ROWS, NAMES)
    data = json.loads(text)
    assert columns.rows(data, OPTIONAL) == ROWS
    assert {name: data[name] for name in data if name not in ("columns", "rows")} == {
        "schema": 2,
        "common": {},
        "notes": [{"x": 1}],
        "machine": {"name": "c"},
    }


def test_a_line_for_each_row_without_what_it_lacks():
    lines = columns.text({}, ROWS, NAMES).splitlines()
    assert lines[4:7] == ['  ["a",{"tile":[1]}],', '  ["b",{"tile":[1,2]},2.5],', '  ["c",null,null,"2026-11-21"]']


def test_what_all_rows_have_alike_is_written_once():
    alike = [{**row, "config": None, "date": "2026-11-20"} for row in ROWS]
    data = json.loads(columns.text({}, alike, NAMES))
    assert data["common"] == {"config": None, "date": "2026-11-20"}
    assert data["rows"] == [["a"], ["b", 2.5], ["c"]]
    assert columns.rows(data, OPTIONAL) == alike


def test_no_rows():
    assert columns.rows(json.loads(columns.text({"left_out": []}, [], NAMES)), OPTIONAL) == []


def test_a_field_without_a_column_is_refused():
    with pytest.raises(ValueError, match="no column for us"):
        columns.text({}, [{"op": "a", "us": 1.0}], NAMES)


@pytest.mark.parametrize("row", [{"op": "a"}, "abcd", ["a", None, 1, "d", 2]])
def test_what_is_no_row_is_refused(row):
    with pytest.raises(ValueError, match="row 0 is no list of at most 4"):
        columns.rows({"common": {}, "columns": NAMES, "rows": [row]}, OPTIONAL)
