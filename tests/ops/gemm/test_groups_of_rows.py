"""groups_of_rows: where each group of neighbouring ids begins and ends."""

import pytest
import torch
from tests.ops.gemm.bounds import run
from tests.ops.gemm.grouped_problems import int32, on_every_place

from tilewright.errors import InputError
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.gemm.groups_of_rows import groups_of_rows


def wanted(ids, groups):
    """By the definition: the rows with ids[i] == g are starts[g] <= i < ends[g]."""
    spans = []
    for g in range(groups):
        rows = [i for i, each in enumerate(ids) if each == g]
        spans.append((rows[0], rows[-1] + 1) if rows else (0, 0))
    return [list(column) for column in zip(*spans, strict=True)]


CASES = {
    "in order": ([0, 0, 1, 2, 2, 2], 3),
    "any order, with an empty group": ([3, 3, 0, 0, 0, 2], 4),
    "padding between": ([-1, 1, 1, -1, -1, 0, -1], 2),
    "ids outside count as padding": ([0, 0, 7, 7, 1], 2),
    "all padding": ([-1, -1, -1], 2),
    "one row": ([0], 1),
    "no rows": ([], 3),
    "more than a program reads": ([g for g in range(5) for _ in range(700)], 5),
}


@on_every_place
@pytest.mark.parametrize("case", CASES)
def test_starts_and_ends(case, place):
    ids, groups = CASES[case]
    starts, ends = run(groups_of_rows, int32(ids, place.device), groups, place=place)
    assert starts.dtype == ends.dtype == torch.int32
    assert [starts.tolist(), ends.tolist()] == wanted(ids, groups)


def test_what_comes_out_are_the_groups_of_grouped_matmul():
    """DeepGEMM's contiguous layout: the group of each row, -1 for padding."""
    ids = int32([1, 1, 1, -1, 0, 0], "cpu")
    a, b = torch.randn(6, 16), torch.randn(2, 16, 8)
    starts, ends = groups_of_rows(ids, 2)
    out = torch.full((6, 8), -7.0)
    grouped_matmul(a, b, ends, starts=starts, out=out)
    torch.testing.assert_close(out[:3], a[:3] @ b[1])
    torch.testing.assert_close(out[4:], a[4:] @ b[0])
    assert (out[3] == -7).all()


def test_a_strided_tensor_of_ids_is_read_as_it_is():
    ids = int32([0, 9, 0, 9, 1, 9], "cpu")[::2]
    assert [t.tolist() for t in groups_of_rows(ids, 2)] == [[0, 2], [2, 3]]


def test_what_it_cannot_do_is_said():
    with pytest.raises(InputError, match=r"ids is \(4,\) torch.int64; needs \(T,\) torch.int32"):
        groups_of_rows(torch.zeros(4, dtype=torch.int64), 2)
    with pytest.raises(InputError, match="groups is 0; needs the number of groups, at least 1"):
        groups_of_rows(torch.zeros(4, dtype=torch.int32), 0)
