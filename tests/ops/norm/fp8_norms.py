"""For tests of rms_norm_fp8 and add_rms_norm_fp8: problems, and the bits of norm and cast one after the other."""

import torch
from tests.ops.norm.fp8_kernels import outputs, same

from tilewright.ops.norm.add_rms_norm import AddRmsNormArgs
from tilewright.ops.norm.add_rms_norm_fp8 import AddRmsNormFp8Args
from tilewright.ops.norm.rms_norm import RmsNormArgs
from tilewright.ops.norm.rms_norm_fp8 import RmsNormFp8Args
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast


def problem(shape, dtype, device="cpu", weight_dtype=None):
    """x, residual and weight; blocks of columns differ in size, so that every group has a scale of its own."""
    n = shape[-1]
    spans = torch.exp2(torch.randint(-6, 7, (-(-n // 128),))).repeat_interleave(128)[:n]
    x, residual = ((torch.randn(shape) * spans).to(device, dtype) for _ in range(2))
    return x, residual, torch.randn(n).to(device, weight_dtype or dtype)


def two_steps(x, residual, weight, options, config):
    """(q, scales, sum) of the kernel without quantisation and the cast.   options: eps, offset, fp32_weight, ue8m0."""
    from tilewright.ops.norm.kernels.triton import fused_rows, rms_norm

    eps, offset, fp32_weight, ue8m0 = options
    dtype = x.dtype if fp32_weight else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if residual is None:
        total = None
        rms_norm.launch((y,), RmsNormArgs(x, weight, eps, offset, fp32_weight), config)
    else:
        total = torch.empty_like(x)
        fused_rows.launch((y, total), AddRmsNormArgs(x, residual, weight, eps, offset, fp32_weight), config)
    return *cast(y.to(x.dtype), TOKEN, ue8m0), total


def check_equal(x, residual, weight, options, config):
    """The fused kernel writes the bits of `two_steps`, and nothing around its outputs."""
    from tilewright.ops.norm.kernels.triton import rms_norm_fp8 as fused

    q, scales, intact = outputs(x.shape, x.device)
    total = None if residual is None else torch.full_like(x, torch.nan)
    if residual is None:
        fused.launch((q, scales), RmsNormFp8Args(x, weight, *options), config)
    else:
        fused.launch_add((q, scales, total), AddRmsNormFp8Args(x, residual, weight, *options), config)
    expected = two_steps(x, residual, weight, options, config)
    assert intact()
    assert same(q, expected[0])
    assert same(scales, expected[1])
    assert total is None or same(total, expected[2])
