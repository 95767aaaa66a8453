"""group_norm: torch's function; orders in memory; the formula of its gradient; its kernels far from zero."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.errors import InputError

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AFFINE = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}
SHAPES = (
    (3, 6, 5, 7),
    (2, 4, 2600),
    (1, 1040, 9),
)  # in one tile; tiles of positions; tiles of channels and of positions
LAST = torch.channels_last


def problem(shape, dtype, affine="both", device="cpu"):
    """x, weight or None, bias or None."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng).to(device, dtype)
    vectors = [torch.randn(shape[1], generator=rng).to(device, dtype) for _ in range(2)]
    return x, *(v if present else None for v, present in zip(vectors, AFFINE[affine], strict=True))


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_function_of_torch(dtype, affine):
    """To rounding: torch multiplies x by weight * rstd."""
    x, weight, bias = problem((3, 6, 5, 7), dtype, affine)
    for groups in (1, 2, 6):
        y, wanted = ops.group_norm(x, groups, weight, bias, eps=1e-3), F.group_norm(x, groups, weight, bias, 1e-3)
        assert y.dtype == wanted.dtype
        torch.testing.assert_close(y, wanted, rtol=torch.finfo(dtype).eps, atol=4e-6)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.interp)])
def test_the_order_in_memory_is_that_of_x(backend):
    x, weight, bias = problem((2, 6, 3, 4), torch.float32)
    dy = torch.randn(x.shape)
    (dx,) = torch.autograd.grad(F.group_norm(x.requires_grad_(), 3, weight, bias), x, dy)
    forms = {"contiguous": x, "last": x.contiguous(memory_format=LAST), "transposed": x.mT.contiguous().mT}
    forms |= {"expanded": x[:1].expand(2, 6, 3, 4), "reversed view": x.flip(0)[1:]}
    for name, form in forms.items():
        leaf = form.detach().requires_grad_()
        y = ops.group_norm(leaf, 3, weight, bias, backend=backend)
        assert y.is_contiguous(memory_format=LAST if name == "last" else torch.contiguous_format), name
        torch.testing.assert_close(y, F.group_norm(form, 3, weight, bias))
        if name in ("contiguous", "last", "transposed"):
            assert torch.equal(form, x)
            for cotangent in (dy, dy.contiguous(memory_format=LAST)):
                torch.testing.assert_close(torch.autograd.grad(y, leaf, cotangent, retain_graph=True)[0], dx)
    volume = torch.randn(2, 4, 2, 3, 2).contiguous(memory_format=torch.channels_last_3d)
    assert ops.group_norm(volume, 2, backend=backend).is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(ops.group_norm(volume, 2, backend=backend), F.group_norm(volume, 2))


def test_vmap_over_images_in_channels_last():
    x, weight, bias = problem((2, 6, 3, 4), torch.float32)
    y = torch.vmap(lambda t: ops.group_norm(t, 3, weight, bias))(x.contiguous(memory_format=LAST)[None])
    torch.testing.assert_close(y[0], F.group_norm(x, 3, weight, bias))


def test_the_gradient_is_that_of_the_formula():
    x, weight, bias = problem((3, 6, 5), torch.float64)
    dy = torch.randn(x.shape, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    found = torch.autograd.grad(ops.group_norm(x, 2, weight, bias, eps=1e-3), leaves, dy)
    rows, wdy = x.reshape(3, 2, 15), (dy * weight[:, None]).reshape(3, 2, 15)
    centred = rows - rows.mean(-1, keepdim=True)
    rstd = (centred.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    x_hat = centred * rstd
    dx = rstd * (wdy - wdy.mean(-1, keepdim=True) - x_hat * (wdy * x_hat).mean(-1, keepdim=True))
    wanted = dx.reshape(x.shape), (dy * x_hat.reshape(x.shape)).sum((0, 2)), dy.sum((0, 2))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_take_any_weight_and_bias(device, affine):
    for shape in SHAPES:
        x, *vectors = problem(shape, torch.float32, affine, device)
        leaves = [t.requires_grad_() for t in (x, *vectors) if t is not None]
        dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        ours, wanted = (ops.group_norm(x, 2, *vectors, backend=backend) for backend in ("triton", "torch"))
        torch.testing.assert_close(ours, wanted)
        for a, b in zip(*(torch.autograd.grad(y, leaves, dy) for y in (ours, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_constant_group_is_its_bias_and_a_group_far_from_zero_is_no_worse_than_torchs(device):
    for shape in SHAPES:
        bias = torch.arange(shape[1], device=device, dtype=torch.float32)
        for value in (255.1, -9999.7):
            y = ops.group_norm(torch.full(shape, value, device=device), 2, None, bias, backend="triton")
            wanted = bias.reshape(-1, *(1,) * (len(shape) - 2)).expand(shape)
            torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)
        x = (1e4 + 1e-2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(device)
        truth = F.group_norm(x.double(), 2)
        error, allowed = (
            (y.double() - truth).norm() / truth.norm()
            for y in (ops.group_norm(x, 2, backend="triton"), F.group_norm(x, 2))
        )
        assert error <= max(float(allowed), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_with_nan_or_infinity_is_nan_and_no_other(device):
    for shape in SHAPES:
        x = problem(shape, torch.float32, device=device)[0]
        x[0, 0, 1], x[-1, -1, 2] = torch.nan, torch.inf
        y = ops.group_norm(x, 2, backend="triton")
        torch.testing.assert_close(y, F.group_norm(x, 2), equal_nan=True)


def test_errors_say_what_was_given_and_what_is_allowed():
    x = torch.ones(2, 6, 4)
    match = r"group_norm: num_groups is 4, x has 6 channels; needs a positive divisor of them\."
    with pytest.raises(InputError, match=match):
        ops.group_norm(x, 4)
    with pytest.raises(InputError, match=r"group_norm: bias is \(4,\); needs \(6,\), the channels of x\."):
        ops.group_norm(x, 2, None, torch.ones(4))
    with pytest.raises(InputError, match=r"group_norm: weight is torch\.bfloat16, x is torch\.float32; they must have"):
        ops.group_norm(x, 2, torch.ones(6).bfloat16())
    with pytest.raises(InputError, match="group_norm: num_groups is a float; needs an integer"):
        ops.group_norm(x, 2.0)
