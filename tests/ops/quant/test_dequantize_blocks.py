"""Numbers of MXFP8, MXFP4 and NVFP4 restored: what is representable, layouts of torch and of gpt-oss."""

import pytest
import torch
from tests.ops.quant.microscale_parts import E2M1

from tilewright import ops
from tilewright.ops.quant import microscale

bf16, fp32 = torch.bfloat16, torch.float32
FORMATS = tuple(microscale.FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_representable_stays(name):
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)]).repeat(2, 4)
    x = numbers * torch.tensor([[4.0], [0.25]])
    made = ops.dequantize_blocks(*ops.cast_to_blocks(x, format=name), dtype=fp32)
    if name == "nvfp4":
        torch.testing.assert_close(made, x, rtol=2**-22, atol=0)
    else:
        assert torch.equal(made, x)


def test_layouts_of_torch_and_of_gpt_oss():
    q, scales = ops.cast_to_blocks(torch.randn(2, 4, 96))
    wanted = ops.dequantize_blocks(q, scales)
    assert q.shape == (2, 4, 48) and scales.shape == (2, 4, 3) and wanted.shape == (2, 4, 96)
    assert torch.equal(ops.dequantize_blocks(q.view(2, 4, 3, 16), scales), wanted)
    assert torch.equal(ops.dequantize_blocks(q, scales.view(torch.float8_e8m0fnu)), wanted)
    assert torch.equal(ops.dequantize_blocks(q.mT.contiguous().mT, scales.mT.contiguous().mT), wanted)


def test_gpt_oss_weights_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=bf16)
    assert torch.equal(ops.dequantize_blocks(blocks, scales).mT, theirs)
