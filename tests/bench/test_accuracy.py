"""Which outputs may be timed: floating-point ones within twice torch's error, integers without any."""

import pytest
import torch

from tilewright.bench.accuracy import Judge, upcast
from tilewright.bench.contestants import copied
from tilewright.dispatch import Sample
from tilewright.ops.quant.layout import TOKEN

FP8 = torch.float8_e4m3fn


def test_packed_integers_must_all_be_right() -> None:
    words = torch.arange(12, dtype=torch.int32).view(3, 4)
    judge = Judge([words], [words], 2.0)
    assert judge(words.clone()) == (True, 0.0)
    wrong = words.clone()
    wrong[2, 3] += 1
    assert judge(wrong)[0] is False
    assert judge(words[:2])[0] is False


@pytest.mark.parametrize(("share", "passes"), [(0.0, True), (0.2, False)])
def test_an_eight_bit_result_beside_its_integers(share: float, passes: bool) -> None:
    """Torch's own rounding is 2 to 3 % of the norm."""
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    words = torch.arange(4, dtype=torch.int32)
    judge = Judge([exact, words], [exact.to(FP8), words], 2.0)
    assert judge(((exact * (1 + share)).to(FP8), words))[0] is passes


def test_lists_of_tensors_are_upcast_and_copied() -> None:
    a, index = torch.ones(2, 3), torch.arange(3)
    wide = upcast(Sample(([a, a], index), {"c": a}))
    assert [t.dtype for t in (*wide.args[0], wide.kwargs["c"])] == [torch.float64] * 3
    assert wide.args[1] is index
    private = copied(Sample(([a, a],)))
    assert all(torch.equal(t, a) and t.data_ptr() != a.data_ptr() for t in private.args[0])


def test_a_copy_keeps_the_padding_between_lines_of_scales() -> None:
    scales = TOKEN.empty(5, 512, "cpu").fill_(2.0)
    (private,) = copied(Sample((scales,))).args
    assert private.stride() == scales.stride() == (1, 8)
    assert torch.equal(private, scales)


def test_a_copy_of_an_expanded_tensor_can_be_written() -> None:
    (private,) = copied(Sample((torch.ones(3, 1).expand(3, 4),))).args
    private[0, 0] = 2
    assert private[0].tolist() == [2, 1, 1, 1]
