"""clip_grad_norm_ is torch's, in float32."""

import math

import pytest
import torch
from torch import nn

from tilewright.errors import InputError
from tilewright.optim import clip_grad_norm_


class Sharded(torch.Tensor):
    """What tells a DTensor, without processes."""

    device_mesh = None


def parameters(*dtypes):
    g = torch.Generator().manual_seed(0)
    params = []
    for dtype in dtypes:
        p = nn.Parameter(torch.zeros(3, 70, dtype=dtype))
        p.grad = torch.randn(70, 3, generator=g).to(dtype).t()
        params.append(p)
    return [*params, nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_float32_is_torch_s(norm_type, max_norm):
    mine, theirs = parameters(torch.float32, torch.float32), parameters(torch.float32, torch.float32)
    norm = clip_grad_norm_(iter(mine), max_norm, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for p, q in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_mixed_dtypes_have_the_norm_of_float32():
    params = parameters(torch.bfloat16, torch.float32)
    exact = torch.cat([p.grad.flatten().double() for p in params[:2]]).norm()
    scaled = [(p.grad.double() / exact).to(p.dtype) for p in params[:2]]
    norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, exact.float(), rtol=1e-6, atol=0)
    for p, wanted in zip(params[:2], scaled, strict=True):
        torch.testing.assert_close(p.grad, wanted)


def test_no_gradients_one_tensor_and_what_is_not_finite():
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0) == 0
    (p, _) = parameters(torch.float32)
    p.grad[0, 0] = torch.nan
    before = p.grad.clone()
    with pytest.raises(RuntimeError, match="must be finite"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(p.grad, before, equal_nan=True)
    assert clip_grad_norm_(p, 1.0).isnan()


def test_what_is_refused_is_named():
    params = parameters(torch.float32)
    with pytest.raises(InputError, match=r"norm_type is 3.0; needs 1, 2 or infinity"):
        clip_grad_norm_(params, 1.0, 3)
    sharded = torch.ones(2).as_subclass(Sharded).requires_grad_()
    sharded.grad = torch.ones(2).as_subclass(Sharded)
    with pytest.raises(InputError, match="is a DTensor; needs plain tensors"):
        clip_grad_norm_(sharded, 1.0)
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="is sparse"):
        clip_grad_norm_(table.parameters(), 1.0)
