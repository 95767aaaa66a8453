"""How multi-head latent attention stores a token: in one dtype, or in 656 bytes with the latent in e4m3.

A token is 576 numbers: the latent (512), which is key and value of all heads, and the rotated part of the key (64).
The form of 656 bytes, which FlashMLA and vLLM read, is

    0 .. 512     e4m3: latent / scale
    512 .. 528   float32: four scales, of 128 numbers each
    528 .. 656   bfloat16: the rotated part
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError
from tilewright.ops.quant import numbers

LATENT, ROPE, GROUP = 512, 64, 128
SCALES = LATENT // GROUP
SCALES_AT, ROPE_AT = LATENT, LATENT + 4 * SCALES
TOKEN_BYTES = ROPE_AT + 2 * ROPE
"""656."""
VECTOR = 16
"""Bytes at whose multiples kernels expect a packed token: they read its parts as other numbers."""


def quantize_mla_cache(kv: Tensor) -> Tensor:
    """The bytes of tokens: kv (..., 576) bf16|fp16|fp32 -> (..., 656) uint8.  A cache, or rows for one.

    scale = max(amax, 1e-4) / 448 over 128 numbers of the latent, in float32; the rotated part is rounded to bfloat16.
    Raises InputError for other sizes and dtypes.
    """
    if not isinstance(kv, Tensor) or kv.dim() < 1 or kv.shape[-1] != LATENT + ROPE or not kv.dtype.is_floating_point:
        got = f"{tuple(kv.shape)} {kv.dtype}" if isinstance(kv, Tensor) else f"a {type(kv).__name__}"
        raise InputError(f"quantize_mla_cache: kv is {got}; needs (..., {LATENT + ROPE}) bfloat16, float16 or float32.")
    latent = kv[..., :LATENT].float().unflatten(-1, (SCALES, GROUP))
    scale = numbers.scale_of(latent.abs().amax(-1))
    parts = (
        numbers.quantise(latent, scale[..., None]).flatten(-2).view(torch.uint8),
        scale.contiguous().view(torch.uint8),
        kv[..., LATENT:].to(torch.bfloat16).contiguous().view(torch.uint8),
    )
    return torch.cat(parts, -1)


def dequantize_mla_cache(cache: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers of tokens: cache (..., 656) uint8|float8_e4m3fn -> (..., 576) in `dtype`, each rounded once.

    Raises InputError for other sizes and dtypes.
    """
    if not isinstance(cache, Tensor) or cache.dim() < 1 or not is_packed(cache):
        got = f"{tuple(cache.shape)} {cache.dtype}" if isinstance(cache, Tensor) else f"a {type(cache).__name__}"
        raise InputError(f"dequantize_mla_cache: cache is {got}; needs (..., {TOKEN_BYTES}) uint8 or float8_e4m3fn.")
    stored = cache.view(torch.uint8)
    float_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    latent = stored[..., :LATENT].contiguous().view(numbers.E4M3).to(float_dtype).unflatten(-1, (SCALES, GROUP))
    scale = stored[..., SCALES_AT:ROPE_AT].contiguous().view(torch.float32).to(float_dtype)
    rope = stored[..., ROPE_AT:].contiguous().view(torch.bfloat16).to(float_dtype)
    return torch.cat(((latent * scale[..., None]).flatten(-2), rope), -1).to(dtype)


def is_packed(cache: Tensor) -> bool:
    """Does a tensor hold tokens of 656 bytes?"""
    return cache.dtype in (torch.uint8, numbers.E4M3) and cache.shape[-1] == TOKEN_BYTES


def is_aligned(cache: Tensor) -> bool:
    """Does every row (pages, page_size, bytes) begin at a multiple of 16 bytes, and is it contiguous?"""
    steps = [hint(step) for n, step in zip(cache.shape[:-1], cache.stride()[:-1], strict=True) if hint(n) > 1]
    hidden = cache.is_meta or is_fake(cache) or torch._C._functorch.is_functorch_wrapped_tensor(cache)
    address = hint(cache.storage_offset()) if hidden else cache.data_ptr()
    return hint(cache.stride(-1)) == 1 and not any(step % VECTOR for step in (address, *steps))
