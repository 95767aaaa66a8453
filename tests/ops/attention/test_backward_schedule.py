"""Into how many parts the backward divides grouped heads."""

import pytest

from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions

FULL, CAUSAL = (-1, -1), (-1, 0)
PARTS = {
    "no groups": (1, (16, 1, (1000, 1000), CAUSAL, (128, 128), 132)),
    "too many items to look at": (1, (64, 4, (16384, 16384), CAUSAL, (128, 128), 132)),
    "key tiles fill the GPU, and no mask": (1, (32, 4, (4096, 4096), FULL, (128, 128), 132)),
    "all apart": (7, (4, 7, (1500, 1500), FULL, (128, 128), 132)),
    "too little to gain": (1, (4, 2, (64, 64), CAUSAL, (128, 128), 132)),
    "a small GPU, and no mask": (1, (4, 7, (1500, 1500), FULL, (128, 128), 8)),
}

# Microseconds on an H200 by the number of parts: docs/notes/2026-11-attention.md
MEASURED = {
    (4, 7, 1500, CAUSAL, 128): {1: 428, 7: 134.8},
    (4, 7, 1500, FULL, 128): {1: 434, 7: 228.8},
    (8, 7, 1500, CAUSAL, 128): {1: 448, 7: 241.1},
    (8, 4, 1024, CAUSAL, 128): {1: 179.6, 2: 110.7, 4: 88.3},
    (8, 4, 2000, CAUSAL, 128): {1: 346, 2: 232.0, 4: 215.4},
    (16, 4, 1021, CAUSAL, 128): {1: 195.7, 2: 147.9, 4: 146.1},
    (8, 8, 2048, CAUSAL, 64): {1: 382.7, 2: 257.1, 4: 238.9, 8: 250.9},
    (4, 8, 777, FULL, 128): {1: 270.2, 2: 157.4, 4: 98.7, 8: 98.5},
    (2, 8, 3001, CAUSAL, 128): {1: 923, 2: 483.5, 4: 292.9, 8: 221.6},
    (32, 4, 512, CAUSAL, 128): {1: 119.8, 2: 102.6, 4: 111.0},
    (8, 4, 4096, CAUSAL, 128): {1: 813.2, 2: 806.2, 4: 692.0},
    (8, 4, 8192, CAUSAL, 128): {1: 3143, 2: 2920, 4: 2708},
    (8, 4, 16384, CAUSAL, 128): {1: 12069, 2: 11544, 4: 10948},
    (32, 4, 4096, CAUSAL, 128): {1: 3176, 2: 2995, 4: 2905},
    (32, 4, 4096, FULL, 128): {1: 5407, 2: 5627, 4: 5683},
    (128, 4, 1024, CAUSAL, 128): {1: 953, 2: 1020, 4: 1034},
    (8, 7, 4096, CAUSAL, 128): {1: 1463, 7: 1300},
    (8, 8, 8192, CAUSAL, 64): {1: 3479, 2: 3308, 4: 2937, 8: 3000},
}


@pytest.mark.parametrize("case", PARTS)
def test_how_many_parts(case):
    expected, sizes = PARTS[case]
    assert divisions.parts(*sizes) == expected


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_choice_is_near_the_best_measured(case):
    kv_heads, group, s, band, d = case
    times = MEASURED[case]
    assert times[divisions.parts(kv_heads, group, (s, s), band, (d, d), 132)] <= 1.06 * min(times.values())


@pytest.mark.parametrize(
    ("kv_heads", "group", "keys", "expected"),
    [(4, 4, 92, 4), (8, 1, 92, 1), (4, 7, 1024, 7), (4, 7, 512, 7), (8, 4, 1024, 2), (8, 4, 1600, 1), (8, 4, 32768, 1)],
)
def test_how_many_parts_of_packed_keys(kv_heads, group, keys, expected):
    assert divisions.parts_of_packed(kv_heads, group, keys, 132) == expected


def test_an_item_of_several_heads_waits_for_the_longest():
    """Two key tiles of 4 and 1 steps, each on its own multiprocessor, two heads: the short one ends after head 1 of
    the long one has begun; without a mask it would not wait.
    """
    assert divisions._rounds([4, 1], 1, 2, True, 2) == pytest.approx(9 * 1.05)
    assert divisions._rounds([4, 1, 1], 1, 2, True, 2) == pytest.approx(9 * 1.05)
    assert divisions._rounds([4, 1, 1], 1, 2, False, 2) == 9
    assert divisions._rounds([1, 1, 1], 1, 2, False, 2) == 6
