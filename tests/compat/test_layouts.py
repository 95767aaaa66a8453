"""Casts, layouts of scales and alignments under DeepGEMM's names."""

import pytest
import torch

from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm.utils import layout, math
from tilewright.errors import InputError
from tilewright.ops.quant.layout import TOKEN

E4M3 = torch.float8_e4m3fn


def by_hand(x: torch.Tensor, blocks: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's formula, x and its blocks' largest magnitudes broadcast to it."""
    scales = blocks.clamp(1e-4) * torch.tensor(1 / 448, dtype=torch.float32)
    if use_ue8m0:
        scales = torch.exp2(scales.double().log2().ceil()).float()
    return (x.float() * (1.0 / scales)).to(E4M3), scales


@pytest.mark.parametrize("gran_k", [128, 32])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_casts_give_deep_gemms_numbers(ue8m0, gran_k):
    x = torch.randn(256, 384).bfloat16()
    wide = x.float().abs()
    rows = wide.view(256, -1, gran_k).amax(2)
    columns = wide.view(-1, gran_k, 384).amax(1)
    squares = wide.view(-1, gran_k, 384 // gran_k, gran_k).amax((1, 3))

    def spread(t: torch.Tensor) -> torch.Tensor:
        for dim in (0, 1):
            t = t.repeat_interleave(x.shape[dim] // t.shape[dim], dim)
        return t

    for cast, amax in (
        (math.per_token_cast_to_fp8, rows),
        (math.per_channel_cast_to_fp8, columns),
        (math.per_block_cast_to_fp8, squares),
    ):
        q, scales = cast(x, use_ue8m0=ue8m0, gran_k=gran_k)
        wanted, wanted_scales = by_hand(x, spread(amax), ue8m0)
        assert scales.shape == amax.shape
        assert scales.dtype == torch.float32
        assert q.is_contiguous()
        assert scales.is_contiguous()  # rows of K blocks, as programs `view` them
        assert torch.equal(spread(scales), wanted_scales)
        assert torch.equal(q.float(), wanted.float())


def test_ragged_sizes():
    x = torch.randn(70, 200).bfloat16()
    assert math.per_token_cast_to_fp8(x, False)[1].shape == (70, 2)
    assert math.per_channel_cast_to_fp8(x, False)[1].shape == (1, 200)
    assert math.per_block_cast_to_fp8(x, False)[1].shape == (1, 2)


@pytest.mark.parametrize("gran_k", [128, 32])
@pytest.mark.parametrize("cast", ["per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8"])
def test_scales_may_be_viewed_in_any_shape(cast, gran_k):
    scales = getattr(math, cast)(torch.randn(384, 640).bfloat16(), True, gran_k)[1]
    assert scales.view(-1).shape == (scales.numel(),)
    bytes_of_each = (scales.view(torch.int32) >> 23).to(torch.uint8)
    assert bytes_of_each.view(-1).numel() == scales.numel()


def test_packed_scales_may_be_viewed_as_bytes():
    words = math.per_token_cast_to_fp8(torch.randn(37, 1024), use_ue8m0=True, use_packed_ue8m0=True)[1]
    assert words.view(torch.uint8).shape == (37, 8)


def test_custom_dimensions():
    x = torch.randn(4, 6, 8)
    q, scales = math.per_custom_dims_cast_to_fp8(x, (0, -1), False)
    wanted, wanted_scales = by_hand(x, x.abs().amax(1, keepdim=True), False)
    assert torch.equal(scales, wanted_scales.squeeze())
    assert torch.equal(q.float(), wanted.float())


def test_powers_of_two():
    x = torch.tensor([[1.0, 1.5, -3.0, 0.25]])
    assert math.ceil_to_ue8m0(x).tolist() == [[1.0, 2.0, 4.0, 0.25]]
    packed = math.pack_ue8m0_to_int(math.ceil_to_ue8m0(x))
    assert packed.view(torch.uint8).tolist() == [[127, 128, 129, 125]]
    tokens = torch.randn(8, 1024)
    plain = math.per_token_cast_to_fp8(tokens, use_ue8m0=True)
    q, words = math.per_token_cast_to_fp8(tokens, use_ue8m0=True, use_packed_ue8m0=True)
    assert torch.equal(q.float(), plain[0].float())
    assert torch.equal(words, math.pack_ue8m0_to_int(plain[1]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gran_k", [128, 32])
def test_casts_back(gran_k, packed):
    x = torch.randn(5, 8 * gran_k + 8)[:, : 8 * gran_k]
    q, scales = math.per_token_cast_to_fp8(x, True, gran_k, use_packed_ue8m0=packed)
    made = math.cast_back_from_fp8(q, scales, gran_k, use_packed_ue8m0=packed)
    plain = math.unpack_ue8m0_from_int(scales) if packed else scales
    assert torch.equal(made, q.float() * plain.repeat_interleave(gran_k, 1))
    torch.testing.assert_close(made, x, rtol=2**-4, atol=1e-2)
    with pytest.raises(InputError, match="has \\(5, 8\\) scales"):
        math.cast_back_from_fp8(q, plain[:, :7], gran_k)


@pytest.mark.parametrize(
    ("x", "exponent"),
    [
        (0.0, -126),
        (-0.0, -126),
        (1e-45, -126),
        (2.0**-126, -126),
        (1.1 * 2.0**-126, -125),
        (-3.0, 2),
        (2.0**127, 127),
        (3e38, 127),
        (float("inf"), 127),
        (-float("inf"), 127),
        (float("nan"), 127),
    ],
)
def test_powers_of_two_at_the_ends(x, exponent):
    for dtype in (torch.float32, torch.float64):
        assert math.ceil_to_ue8m0(torch.tensor([x], dtype=dtype)).tolist() == [2.0**exponent]


def test_a_batch_is_sent_to_the_op():
    with pytest.raises(InputError, match=r"x is \(2, 4, 8\); needs two dimensions"):
        math.per_token_cast_to_fp8(torch.ones(2, 4, 8), False)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "groups"])
def test_scales_are_laid_out_once(batch):
    scales = torch.rand(*batch, 37, 5)
    made = layout.get_mn_major_tma_aligned_tensor(scales)
    assert torch.equal(made, scales)
    assert made.stride()[-2:] == (1, 40) == (1, layout.get_tma_aligned_size(37, 4))
    if batch:
        assert made.stride(0) == 40 * 5
    assert layout.get_mn_major_tma_aligned_tensor(made) is made
    groups = batch[0] if batch else None
    through = deep_gemm.transform_sf_into_required_layout(scales, 37, 600, (1, 128, 128), groups, is_sfa=True)
    assert through.stride() == made.stride()
    again = deep_gemm.transform_sf_into_required_layout(
        made, 37, 600, (1, 128), groups, psum_layout=torch.tensor([20, 37], dtype=torch.int32)
    )
    assert again is made
    assert TOKEN.mismatch(through, 37, 600) is None


def test_scales_of_squares_stay_where_they_are():
    scales = torch.rand(2, 5)
    assert deep_gemm.transform_sf_into_required_layout(scales, 200, 600, (1, 128, 128), is_sfa=False) is scales
    assert deep_gemm.transform_sf_into_required_layout(scales, 200, 600, (128, 128)) is scales


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((torch.rand(2, 5), 200, 600, (1, 128, 128)), {}, "is_sfa goes with recipes of three numbers"),
        ((torch.rand(2, 5), 200, 600, (1, 32)), {}, r"scales of \(1, 32\) elements"),
        ((torch.rand(2, 5), 200, 600, (1, 128)), {}, r"are \(2, 5\); 1x128 of \(200, 600\) are \(200, 5\)"),
        ((torch.rand(2, 5), 200, 600, (128, 128), 4), {}, r"are \(4, 2, 5\)"),
        ((torch.rand(2, 5).int(), 200, 600, (128, 128)), {}, "packed for Blackwell"),
    ],
)
def test_what_is_refused(args, options, message):
    with pytest.raises(InputError, match=message):
        deep_gemm.transform_sf_into_required_layout(*args, **options)


def test_alignment_of_groups():
    assert layout.get_m_alignment_for_contiguous_layout() == layout.get_k_alignment_for_contiguous_layout() == 128
    assert layout.get_theoretical_mk_alignment_for_contiguous_layout(4) == 128
    try:
        layout.set_mk_alignment_for_contiguous_layout(16)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 16
        with pytest.raises(InputError, match="at least 1"):
            layout.set_mk_alignment_for_contiguous_layout(0)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 16
    finally:
        layout.set_mk_alignment_for_contiguous_layout(128)
