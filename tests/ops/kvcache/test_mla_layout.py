"""Tokens of 656 bytes: where each number lies, what rounding costs, and what is refused."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, dequantize_mla_cache, quantize_mla_cache


def test_bytes_of_a_token():
    kv = torch.randn(3, 5, 576, dtype=torch.bfloat16)
    packed = quantize_mla_cache(kv)
    assert packed.shape == (3, 5, TOKEN_BYTES)
    assert packed.dtype == torch.uint8
    latent = kv[..., :512].float().view(3, 5, 4, 128)
    scale = packed[..., 512:528].contiguous().view(torch.float32)
    torch.testing.assert_close(scale, latent.abs().amax(-1) / 448)
    codes = packed[..., :512].contiguous().view(torch.float8_e4m3fn).float().view(3, 5, 4, 128)
    assert torch.equal(codes.abs().amax(-1), torch.full((3, 5, 4), 448.0))
    assert torch.equal(packed[..., 528:].contiguous().view(torch.bfloat16), kv[..., 512:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_there_and_back(dtype):
    kv = (torch.randn(7, 576) * torch.exp2(4 * torch.randn(7, 1))).to(dtype)
    back = dequantize_mla_cache(quantize_mla_cache(kv), torch.float32)
    step = kv[:, :512].float().view(7, 4, 128).abs().amax(-1) / 448
    error = (back - kv.float()).abs()
    allowed = torch.maximum(kv.float().abs() * 2.0**-4, step.repeat_interleave(128, 1).new_zeros(7, 576))
    allowed[:, :512] += step.repeat_interleave(128, 1) * 2.0**-9
    allowed[:, 512:] = kv[:, 512:].float().abs() * 2.0**-8
    assert bool((error <= allowed * 1.001).all())


def test_float8_is_bytes():
    packed = quantize_mla_cache(torch.randn(2, 576))
    assert torch.equal(dequantize_mla_cache(packed), dequantize_mla_cache(packed.view(torch.float8_e4m3fn)))


@pytest.mark.parametrize("kv", [torch.zeros(2, 512), torch.zeros(2, 576, dtype=torch.int32), [1.0]])
def test_what_is_no_token(kv):
    with pytest.raises(InputError, match="quantize_mla_cache: kv is"):
        quantize_mla_cache(kv)


@pytest.mark.parametrize("cache", [torch.zeros(2, 576), torch.zeros(2, 576, dtype=torch.uint8), [1]])
def test_what_is_no_cache(cache):
    with pytest.raises(InputError, match="dequantize_mla_cache: cache is"):
        dequantize_mla_cache(cache)
