"""grad_norm: torch's norms, of what is not finite too."""

import math

import pytest
import torch

from tilewright.ops import grad_norm

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_values_that_are_not_finite(backend, norm_type):
    x = torch.randn(5000)
    assert grad_norm(x, norm_type=norm_type, backend=backend).shape == ()
    x[4000] = -torch.inf
    assert grad_norm(x, norm_type=norm_type, backend=backend) == math.inf
    x[70] = torch.nan
    assert grad_norm(x, norm_type=norm_type, backend=backend).isnan()
    assert grad_norm(x[:0], norm_type=norm_type, backend=backend) == 0


@pytest.mark.interp
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_parts_of_several_blocks(norm_type):
    """Four programs of four blocks each, and one of 16."""
    from tilewright.ops.optim.grad_norm import GradNormArgs
    from tilewright.ops.optim.kernels.triton.grad_norm import Config, launch

    x = torch.randn(1000)
    for parts in (4, 1):
        y = torch.full((), torch.nan)
        launch((y,), GradNormArgs(x, norm_type), Config(64, parts, 4))
        torch.testing.assert_close(y, torch.linalg.vector_norm(x, norm_type))


def test_a_gradient_of_the_norm_is_torch_s():
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(grad_norm, (x,))
