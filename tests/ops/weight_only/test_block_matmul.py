"""Products by MXFP4, NVFP4 and MXFP8 weights: each block's scale, shapes, refusals, and the kernel of registers."""

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract
from tilewright.errors import BackendError, InputError
from tilewright.ops.quant import microscale
from tilewright.ops.weight_only.block_matmul import BlockMatmulArgs
from tilewright.ops.weight_only.kernels.sm90 import block_weights

bf16, fp32 = torch.bfloat16, torch.float32
FORMS = {"int4": 0, "mxfp4": 1, "nvfp4": 2, "mxfp8": 3}


def operands(format, m, n, k, device="cpu"):
    """x, (q, scales, tensor_scale), and w in float64, from their bytes by an element at a time of the public layout."""
    x = torch.randn(m, k, device=device).to(bf16)
    w = torch.randn(n, k, device=device) * torch.exp2(6 * torch.rand(n, 1, device=device) - 3) / k**0.5
    if format == "int4":
        q, scales = ops.quantize_weight(w, bits=4, backend="torch")
        return x, (q, scales, None), ops.dequantize_weight(q, scales, dtype=fp32, backend="torch").double()
    q, scales, *whole = ops.cast_to_blocks(w, format=format, backend="torch")
    codes = torch.stack((q & 15, q >> 4), -1).flatten(1) if q.dtype == torch.uint8 else q
    numbers = torch.tensor([*microscale.MAGNITUDES, *(-v for v in microscale.MAGNITUDES)], device=device)
    elements = numbers[codes.long()].double() if q.dtype == torch.uint8 else q.double()
    each = scales.double() if whole else torch.exp2(scales.double() - 127)
    wide = elements * each.repeat_interleave(k // scales.shape[1], 1) * (whole[0].double() if whole else 1)
    return x, (q, scales, *(whole or [None])), wide


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8"])
def test_every_block_has_its_own_scale(format):
    x, weight, wide = operands(format, 5, 24, 160)
    bias = torch.randn(24)
    made = ops.weight_only_matmul(x, *weight[:2], tensor_scale=weight[2], bias=bias, out_dtype=fp32)
    assert ((made - (x.double() @ wide.T + bias)).abs() <= 3e-6 * (x.double().abs() @ wide.abs().T + 1)).all()
    batched = ops.block_matmul(x.expand(2, 5, 160), *weight)
    assert batched.shape == (2, 5, 24)
    assert torch.equal(batched[1], ops.block_matmul(x, *weight))


def test_what_is_refused():
    x, (q, scales, _), _ = operands("mxfp4", 2, 16, 64)
    with pytest.raises(InputError, match="no activation and no out"):
        ops.weight_only_matmul(x, q, scales, activation="relu")
    with pytest.raises(InputError, match="tensor_scale is given, and mxfp4 has none"):
        ops.block_matmul(x, q, scales, torch.ones(1))
    with pytest.raises(InputError, match="integers have none"):
        ops.weight_only_matmul(x, *ops.quantize_weight(torch.randn(16, 64)), tensor_scale=torch.ones(1))
    with pytest.raises(BackendError):
        ops.block_matmul(x, q, scales, backend="cuda")


def test_rows_that_begin_anywhere_are_planned_apart():
    """A plan belongs to a bucket: one made for rows of 16 bytes must not serve others, which a kernel cannot read."""
    x, (q, scales, _), _ = operands("mxfp4", 2, 16, 128)
    args = BlockMatmulArgs(x, q, scales, None, None, bf16)
    shifted = torch.nn.functional.pad(x, (1, 0))[:, 1:]
    bucket = contract("block_matmul").forward.bucket
    assert bucket(*args).aligned
    assert not bucket(*args._replace(x=shifted)).aligned


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMS)
@pytest.mark.parametrize(("n", "k"), [(200, 640), (1, 128), (520, 14336)])
def test_every_config_of_the_kernel(format, n, k):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("is written for Hopper")
    for m in (1, 8, 9, 16):
        x, weight, wide = operands(format, m, n, k, "cuda")
        bias = torch.randn(n, device="cuda").to(bf16)
        wanted, size = x.double() @ wide.T + bias.double(), x.double().abs() @ wide.abs().T + bias.double().abs()
        for config in block_weights.CONFIGS:
            d = torch.full((m, n), torch.nan, device="cuda")
            block_weights.multiply(d, x, *weight, bias, FORMS[format], config)
            assert ((d.double() - wanted).abs() <= 2e-6 * size).all(), config
