"""The format of quantised weights bit by bit, and scales that are rounded as they are stored."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.ops.weight_only import packing

bf16, fp32 = torch.bfloat16, torch.float32


def test_the_low_four_bits_are_the_even_element():
    packed = packing.pack(torch.tensor([[1, -2, 7, -8]], dtype=torch.int8))
    assert packed.tolist() == [[0xE1, 0x87]]
    assert packing.unpack(packed).tolist() == [[1, -2, 7, -8]]


def test_every_pair_of_elements_survives_packing():
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(packing.unpack(packing.pack(pairs)), pairs)


def test_rounding_to_bfloat16_is_that_of_a_cast():
    kept = torch.arange(0, 1 << 16, 7) << 16
    cut = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # below, at and above ties to even and odd
    x = (kept[:, None] | cut).to(torch.int32).view(fp32)
    made, wanted = packing.to_bfloat16(x), x.to(bf16).float()
    assert torch.equal(made.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(made[numbers].view(torch.int32), wanted[numbers].view(torch.int32)), "the signs of zeros too"


class KeptWide(TorchDispatchMode):
    """What fused operations are to a compiler that does not round what it holds in registers: bfloat16 is float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == bf16:
            kwargs["dtype"] = fp32
        return func(*args, **kwargs)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_belong_to_the_stored_scales_where_a_compiler_keeps_float32(bits):
    w = torch.randn(37, 384).to(bf16)
    wanted, wanted_scales = packing.quantise(w, bits)
    with KeptWide():
        q, scales = packing.quantise(w, bits)
    assert torch.equal(q, wanted)
    assert torch.equal(scales, wanted_scales)
