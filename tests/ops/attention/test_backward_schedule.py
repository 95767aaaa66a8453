"""Into how many parts the backward divides grouped heads."""

import pytest

from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions

PARTS = {
    "no groups": (1, (16, 1, (1000, 1000), (-1, 0), (128, 128), 132)),
    "key tiles fill the GPU": (1, (8, 4, (16384, 16384), (-1, 0), (128, 128), 132)),
    "in time even though items are few": (1, (8, 4, (4096, 4096), (-1, 0), (128, 128), 132)),
    "all apart": (7, (4, 7, (1500, 1500), (-1, -1), (128, 128), 132)),
    "by twos": (2, (16, 4, (1000, 1100), (-1, 0), (128, 128), 132)),
    "too little to gain": (1, (4, 2, (64, 64), (-1, 0), (128, 128), 132)),
    "a small GPU": (1, (4, 7, (1500, 1500), (-1, -1), (128, 128), 8)),
}


@pytest.mark.parametrize("case", PARTS)
def test_how_many_parts(case):
    expected, sizes = PARTS[case]
    assert divisions.parts(*sizes) == expected
