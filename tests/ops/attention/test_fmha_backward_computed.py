"""The backward for Hopper's tensor cores: what it computes, on a Hopper GPU."""

from typing import Any

import pytest
import torch
from tests.ops.attention.test_fmha_backward_cuda import (
    EVERYTHING,
    by_rows,
    documents,
    fp16,
    problem,
    run,
    sequences,
)

from tilewright import mask as masks
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.bucket import backward_bucket
from tilewright.ops.attention.kernels.sm90 import backward
from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions
from tilewright.ops.attention.reference import attention, attention_backward


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


COMPUTED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "grouped by seven": {"s_q": 700, "s_k": 600, "heads": 14, "kv_heads": 2, "batch": 1, "right": 0, "dlse": True},
    "grouped by six": {"s_q": 300, "s_k": 900, "heads": 12, "kv_heads": 2, "by_token": True, "slopes": True},
    "one tile": {"s_q": 128, "s_k": 128, "right": 0},
    "one query": {"s_q": 1, "s_k": 1000, "right": 0},
    "one key": {"s_q": 70, "s_k": 1, "dlse": True},
    "rows without keys": {"s_q": 500, "s_k": 123, "right": 0},
    "rows of nothing but a sink": {"s_q": 500, "s_k": 123, "right": 0, "sinks": True},
    "keys that no query sees": {"s_q": 100, "s_k": 900, "left": 50, "right": 0},
    "window": {"s_q": 900, "s_k": 1000, "left": 70, "right": 33},
    "to the left alone": {"s_q": 700, "s_k": 900, "left": 200},
    "to the right alone": {"s_q": 700, "s_k": 500, "right": 64},
    "by token": {"by_token": True, "right": 0},
    "fp16": {"dtype": fp16, "right": 0},
    "many tiles": {"s_q": 1111, "s_k": 1111, "batch": 4, "heads": 8, "right": 0, "dlse": True},
    "more tiles than blocks": {"s_q": 512, "s_k": 640, "batch": 8, "heads": 16, "kv_heads": 16, "right": 0},
    "softcap": {"softcap": 1.5},
    "everything": {"left": 90, "right": 20, "sinks": True, "dlse": True, **EVERYTHING},
    "scale 0": {"scale": 0.0, "dlse": True},
    "scale below 0": {"scale": -0.3, "right": 0},
    **{f"D = {d}": {"d": d, "right": 0} for d in (8, 32, 64, 72, 80, 96)},
    "D = 64 with everything": {"d": 64, "right": 0, "sinks": True, **EVERYTHING},
    "values are narrower": {"d": 128, "d_v": 64, "right": 0},
    "values are wider": {"d": 64, "d_v": 128, "right": 0},
}
RAGGED, LONGER, SHORTER = [37, 1, 300, 0, 64, 21], [140, 9, 300, 30, 64, 170], [12, 1, 290, 5, 0, 30]
COMPUTED |= {
    "packed": {"s_q": 423, "s_k": 423, "mask": sequences(RAGGED, causal=True)},
    "packed, full": {"s_q": 423, "s_k": 423, "mask": sequences(RAGGED)},
    "packed, by token": {"s_q": 423, "s_k": 423, "by_token": True, "mask": sequences(RAGGED, causal=True)},
    "packed, longer keys": {"s_q": 423, "s_k": 713, "mask": sequences(RAGGED, LONGER, causal=True), "dlse": True},
    "packed, more queries": {"s_q": 423, "s_k": 338, "mask": sequences(RAGGED, SHORTER, causal=True), "sinks": True},
    "packed, tokens behind": {"s_q": 600, "s_k": 999, "mask": sequences(RAGGED, LONGER), "dlse": True},
    "packed, window": {"s_q": 423, "s_k": 713, "mask": sequences(RAGGED, LONGER, window=(40, 10))},
    "packed, keys no query sees": {"s_q": 200, "s_k": 1500, "mask": sequences([70, 99], [900, 600], window=(5, 0))},
    "packed, keys without queries": {"s_q": 200, "s_k": 900, "mask": sequences([70, 0, 130], [100, 500, 300])},
    "packed, nothing": {"s_q": 200, "s_k": 300, "mask": sequences([])},
    "packed, one token each": {"s_q": 300, "s_k": 300, "mask": sequences([1] * 300)},
    "packed, many tiles": {
        "s_q": 3000, "s_k": 3000, "heads": 8, "mask": sequences([500, 128, 900, 3, 1000, 256, 213], causal=True),
    },
    "packed, fp16 with everything": {
        "s_q": 423, "s_k": 423, "mask": sequences(RAGGED, causal=True), "dtype": fp16, "sinks": True, **EVERYTHING,
    },
    "packed, D = 96": {"s_q": 423, "s_k": 713, "d": 96, "mask": sequences(RAGGED, LONGER, causal=True)},
    "packed, D = 64": {"s_q": 423, "s_k": 713, "d": 64, "mask": sequences(RAGGED, LONGER, causal=True)},
    "packed, D = 64, many": {"s_q": 2000, "s_k": 2000, "d": 64, "mask": sequences([700, 1, 900, 399], causal=True)},
    "documents": {"s_q": 700, "s_k": 700, "mask": documents([0, 100, 100, 612])},
    "causal documents, last queries": {"s_q": 300, "s_k": 700, "mask": documents([0, 100, 612, 700], masks.causal())},
    "rows of documents": {"s_q": 700, "s_k": 700, "mask": by_rows(130, 311)},
    "rows of documents, causal": {
        "s_q": 1300, "s_k": 1300, "batch": 3, "mask": by_rows(64, 999, 2000, also=masks.causal()),
    },
    "rows of documents, last queries": {"s_q": 300, "s_k": 700, "mask": by_rows(1, 444, also=masks.window(90, 3))},
    "rows of documents, queries before": {"s_q": 700, "s_k": 300, "mask": by_rows(41, 128), "sinks": True},
    "rows of documents, D = 64": {"s_q": 900, "s_k": 900, "d": 64, "mask": by_rows(77, 500, also=masks.causal())},
    "documents in a window, rows before": {"s_q": 700, "s_k": 500, "mask": documents([0, 100, 400], masks.window(60))},
}  # fmt: skip


GROUPS = [(case, 0) for case in COMPUTED] + [
    (case, parts)
    for case in (
        "full",
        "window",
        "by token",
        "fp16",
        "grouped by seven",
        "grouped by six",
        "D = 64",
        "values are wider",
    )
    for parts in (1, 2, 7)
    if COMPUTED[case].get("heads", 4) // COMPUTED[case].get("kv_heads", 2) % parts == 0
]
"""Cases and parts of their groups; 0: what is chosen."""


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "parts"), GROUPS)
def test_gradients(monkeypatch, case, parts):
    """Against float64, in units of what rounding P, dS and o costs; in poisoned memory; the same bits again."""
    on_hopper()
    if parts:
        monkeypatch.setattr(divisions, "parts", lambda *_: parts)
    p = problem(device="cuda", **COMPUTED[case])
    dtype = p.do.dtype
    wide = [None if t is None else t.double() for t in (p.do, p.dlse, *p.tensors, *p.options[:2])]
    o, lse = attention(FmhaArgs(*wide[2:], *p.options[2:]))
    exact = attention_backward(FmhaBackwardArgs(*wide[:5], o, lse, *wide[5:], *p.options[2:]))
    given = o.to(dtype), lse.float()
    eps = torch.finfo(dtype).eps
    bucket = backward_bucket(p.args(*given))
    for config in backward.candidates(bucket, dtype):
        made = run(p, config, *given)
        for name, found, wanted in zip(("dq", "dk", "dv", "dsinks"), made, exact, strict=True):
            error = (found.double() - wanted).abs()
            size = wanted.abs().max() if wanted.numel() else torch.ones(())
            assert (error <= 8 * eps * size + 1e-5).all(), name
            assert error.norm() <= 2 * eps * wanted.norm() + 1e-5 * error.numel() ** 0.5, name
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(p, config, *given), made, strict=True)), "the same bits"
