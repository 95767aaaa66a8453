"""gelu_and_mul(x): gate and up side by side in the last dimension, the gate first."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.ops.activation.gelu_and_mul import gelu_and_mul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("approximate", "name"), [("tanh", "gelu_pytorch_tanh"), ("none", "gelu")])
def test_it_is_hugging_faces_formula_bit_for_bit(dtype, approximate, name):
    x = torch.randn(3, 17, 192).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(gelu_and_mul(x, approximate=approximate), ACT2FN[name](gate) * up)


def test_the_gradient_is_packed_in_the_same_way():
    x = torch.tensor([0.0, 7.0], requires_grad=True)
    gelu_and_mul(x).backward()
    assert x.grad.tolist() == [3.5, 0.0]  # gelu'(0) * up, gelu(0)
