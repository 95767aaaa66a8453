"""What dispatch remembers of signatures stays within a bound of host memory."""

import torch

from tilewright import ops
from tilewright.dispatch import contract
from tilewright.dispatch.bounded import Bounded, host_bytes


def test_the_oldest_leaves_first():
    kept = Bounded(limit=4000)
    for i in range(100):
        kept.put((i, "key"), ("x" * 300, i))
    assert (99, "key") in kept and (0, "key") not in kept
    assert list(kept) == [(i, "key") for i in range(100 - len(kept), 100)]
    assert sum(host_bytes(item) for item in kept.items()) <= 4000


def test_a_new_value_takes_the_place_of_the_old_one():
    kept = Bounded(limit=4000)
    for i in range(100):
        kept.put("key", "x" * i)
    kept.put("other", 1)
    assert dict(kept) == {"key": "x" * 99, "other": 1}


def test_what_is_beyond_the_bound_is_not_kept():
    kept = Bounded(limit=1000)
    kept.put("small", 1)
    kept.put("large", "x" * 2000)
    assert dict(kept) == {"small": 1}
    kept.clear()
    kept.put("small", 2)
    assert dict(kept) == {"small": 2}


def test_bytes_are_those_of_everything_that_is_held():
    class Slotted:
        __slots__ = ("held",)

        def __init__(self, held):
            self.held = held

    class Plain:
        def __init__(self, held):
            self.held = held

        def method(self):
            return self.held

    long = "x" * 10_000
    for value in ((long,), [long], {1: long}, {long: 1}, Slotted(long), Plain(long), Plain([long]).method):
        assert 10_000 < host_bytes(value) < 12_000
    assert host_bytes((long, long)) < 12_000  # counted once
    assert host_bytes(host_bytes) == 0  # a function is everybody's


def test_many_signatures_of_attention_stay_within_the_bound(replay_on_cpu):
    raws = [contract("fmha").forward, contract("fmha").gradient.op]
    for raw in raws:
        raw.entries.limit = 40_000
    try:
        for s in range(1, 60):
            q = torch.randn(1, 2, s, 8)
            ops.fmha(q, q, q, causal=True)
        forward = raws[0].entries
        assert 5 < len(forward) < 59
        assert sum(host_bytes(item) for item in forward.items()) <= forward.limit
    finally:
        for raw in raws:
            raw.entries.limit = 12 << 20
            raw.forget_plans()
