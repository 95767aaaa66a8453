"""The accuracy rule on what a cast returns: float8, integers, and scales with gaps between their lines."""

import torch

from tilewright.ops.quant.layout import TOKEN
from tilewright.validate.modes.memory import guarded
from tilewright.validate.rule import standard

E4M3 = torch.float8_e4m3fn


def test_float8_is_judged_by_half_a_step():
    exact = torch.randn(64, 64, dtype=torch.float64)
    torchs = exact.to(E4M3)
    rule = standard("q", exact, torchs, [torchs], 2.0)
    assert rule.judge(torchs).faults == ()
    halved = torchs.clone()
    halved[3, 5:] = (torchs[3, 5:].float() / 2).to(E4M3)
    assert any("rows wrong: row 3" in fault for fault in rule.judge(halved).faults)


def test_a_float8_nan_must_stand_where_the_oracles_does():
    exact = torch.ones(4, 32, dtype=torch.float64)
    exact[1, 2] = torch.nan
    torchs = exact.to(E4M3)
    rule = standard("q", exact, torchs, [torchs], 2.0)
    assert rule.judge(torchs).faults == ()
    assert any("first difference at (1, 2)" in fault for fault in rule.judge(torch.ones(4, 32).to(E4M3)).faults)


def test_integers_must_be_the_references():
    words = torch.arange(12, dtype=torch.int32).view(3, 4)
    rule = standard("scales", words, words, [words], 2.0)
    assert rule.judge(words.clone()).faults == ()
    other = words.clone()
    other[2, 1] += 1
    assert rule.judge(other).faults == ("scales: 1 integers are not the reference's; first difference at (2, 1)",)


def test_a_guarded_output_has_its_gaps_inside():
    like = TOKEN.empty(5, 300, "cpu")
    made = guarded(tuple(like.shape), like.dtype, torch.device("cpu"), 16, strides=like.stride())
    assert made.stride() == (1, 8)
    assert made.isnan().all()
    assert made.untyped_storage().nbytes() == 4 * (16 + 2 * 8 + 5 + 16)
