"""Majors, layouts and alignment: what a choice of kernel may depend on, of real and of fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.ops.gemm.operands import (
    ACTIVATIONS,
    LAYOUTS,
    Major,
    activate,
    aligned,
    apply_epilogue,
    copyable,
    layout_code,
    major_a,
    major_b,
    unit_stride,
)

HALF = torch.bfloat16


def matrix(rows, columns, strides, offset=0):
    need = offset + (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1
    return torch.zeros(max(need, 1), dtype=HALF).as_strided((rows, columns), strides, offset)


@pytest.mark.parametrize(
    ("shape", "strides", "of_a", "of_b"),
    [
        ((4, 8), (8, 1), Major.K, Major.MN),
        ((4, 8), (1, 4), Major.MN, Major.K),
        ((4, 8), (16, 1), Major.K, Major.MN),
        ((4, 8), (16, 2), None, None),
        ((4, 8), (0, 1), Major.K, Major.MN),
        ((1, 8), (8, 1), Major.K, Major.MN),
        ((1, 8), (1, 1), Major.K, Major.MN),  # of a row only its columns tell
        ((8, 1), (1, 1), Major.MN, Major.K),
        ((8, 1), (5, 1), Major.K, Major.MN),
        ((1, 8), (1, 5), Major.MN, Major.K),
        ((1, 1), (2, 2), None, None),
    ],
)
def test_majors(shape, strides, of_a, of_b):
    t = matrix(*shape, strides)
    assert (major_a(t), major_b(t)) == (of_a, of_b)
    assert major_a(unit_stride(t)) is not None
    assert (unit_stride(t) is t) == (of_a is not None)


def test_layout_codes_are_those_of_their_names():
    a, b = matrix(4, 8, (8, 1)), matrix(8, 16, (16, 1))
    turned_a, turned_b = matrix(4, 8, (1, 4)), matrix(8, 16, (1, 8))
    found = [layout_code(x, y) for x, y in ((a, turned_b), (a, b), (turned_a, b), (turned_a, turned_b))]
    assert found == [LAYOUTS.index(name) for name in ("nt", "nn", "tn", "tt")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (matrix(4, 8, (8, 1)), True),
        (matrix(4, 9, (9, 1)), False),  # rows of 18 bytes
        (matrix(4, 9, (16, 1)), True),  # in a matrix of 32
        (matrix(4, 8, (8, 1), 8), True),
        (matrix(4, 8, (8, 1), 4), False),  # begins at 8 bytes
        (matrix(1, 9, (9, 1)), True),  # one row steps nowhere
        (matrix(8, 9, (0, 1)), False),  # the copy engine repeats no row
        (matrix(9, 8, (1, 16)), True),
        (torch.zeros(3, 4, 8, dtype=HALF), True),
        (torch.zeros(3, 4, 12, dtype=HALF)[:, :, :8], False),
        (torch.zeros(3, 100, dtype=HALF)[:, :96].view(3, 4, 24), False),  # the batch steps 200 bytes
        (torch.zeros(3, 1, 1, dtype=HALF), False),  # and here 2: a batch of single elements is no line
    ],
)
def test_what_the_copy_engine_can_read(t, expected):
    assert copyable(t) is expected
    with FakeTensorMode() as mode:
        assert copyable(mode.from_tensor(t)) is expected


@pytest.mark.parametrize(
    ("n_out", "dtype", "expected"),
    [(8, HALF, True), (12, HALF, False), (12, torch.float32, True), (1, torch.float32, False)],
)
def test_rows_of_the_result(n_out, dtype, expected):
    assert aligned(matrix(4, 8, (8, 1)), matrix(8, 16, (16, 1)), n_out, dtype) is expected


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_epilogue_rounds_once(activation):
    z, bias = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    c = torch.randn(5, 4 if activation == "swiglu" else 8, dtype=torch.float64)
    made = apply_epilogue(z, bias, c, activation, HALF)
    assert torch.equal(made, (activate(z + bias, activation) + c).to(HALF))
    assert apply_epilogue(z, None, None, activation, torch.float32).dtype == torch.float32
