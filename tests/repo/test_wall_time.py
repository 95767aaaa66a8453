"""No test that runs by default judges wall time: on a busy machine it would fail, and say nothing of the code."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"}

# Reads a clock to choose a limit for what hangs; a slower machine makes the limit longer.
LIMITS = {"tuning/test_tune.py"}


def clock_readings(source: str) -> list[int]:
    """Lines on which a test reads a clock of the module `time`."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in CLOCKS
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in CLOCKS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "time"
            )
            or (isinstance(node.func, ast.Name) and node.func.id in names)
        )
    ]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.perf_counter()", [2]),
        ("from time import monotonic as now\nnow()", [2]),
        ("import time\ntime.sleep(1)", []),
        ("clock.perf_counter()", []),
    ],
)
def test_a_reading_is_found(source, lines):
    assert clock_readings(source) == lines


def test_no_default_test_reads_the_clock():
    found = []
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text()
        if file.relative_to(TESTS).as_posix() in LIMITS or "pytestmark = pytest.mark.gpu" in source:
            continue
        found += [f"{file.relative_to(TESTS)}:{line}" for line in clock_readings(source)]
    assert found == []
