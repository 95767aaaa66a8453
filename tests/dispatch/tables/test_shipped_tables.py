"""Tables in the package: readable, and every row names an implementation and a configuration that exist."""

from collections import namedtuple

import pytest
import torch

import tilewright.ops
from tilewright.dispatch import contract, implementations
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.configs import from_row, to_row

FILES = sorted(table.folders()[0].glob("*/*.json"))
ROWS = [(path.stem, row) for path in FILES for row in table.read(path)[1]]


def test_there_is_a_table_for_the_h200():
    assert {path.parent.name for path in FILES} == {"nvidia-h200"}


def test_a_file_holds_its_op_alone():
    """A look-up reads no other file; a row elsewhere would never be found."""
    assert [row for name, row in ROWS if row.op != name] == []


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda v: v if isinstance(v, str) else f"{v.op}-{v.bucket}")
def test_a_row_can_be_followed(name, row):
    subject = contract(row.op)
    raw = {op.direction: op for op in subject.raw_ops}[row.direction]
    assert row.us > 0 and row.numerics == "default"
    assert row.bucket.split(",")[0].split("=")[0] == raw.bucket_names[0]
    sizes = [int(size.split("=")[1]) for size in row.bucket.split(",")]
    bucket = namedtuple("Bucket", raw.bucket_names)(*sizes)
    dtype = getattr(torch, row.dtype)
    for choice in row.choices:
        if choice.backend != "torch":
            implementation = implementations(raw.op, raw.direction)[choice.backend]
            assert hasattr(tilewright.ops, row.op)
            if choice.config is not None:
                config = from_row(implementation, choice.config, bucket, dtype)
                fitted = to_row(config, implementation.kernel_of(config).kernel)
                assert choice.config.items() <= fitted.items()
