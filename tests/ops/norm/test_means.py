"""Means of norms are right where a difference follows: constant rows, and rows far from zero.

An ULP of the mean of a row of 255 is 1.5e-5, and 1 / std of a constant row is 316: off by that ULP, LayerNorm gives
5e-3 in place of 0.  The interpreter divides exactly, a GPU does not unless it is told to: so the text of the compiled
kernels is read too, and the same rows run on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from tests.harness.cases import declared_calls

from tilewright import ops
from tilewright.dispatch import contract, implementations

WIDTHS = (333, 512, 4096, 20000)  # a masked tail; whole; wide; longer than registers
VALUES = (255.0, 255.1, -9999.7, 0.1)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
NORMS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8", "layer_norm")
KERNELS = [(name, op.direction) for name in (*NORMS, "softmax") for op in contract(name).raw_ops]


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_a_constant_row_is_its_bias(device, value, n):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, n), value, device=device, dtype=dtype)
        weight, bias = torch.ones(n, device=device, dtype=dtype), torch.arange(n, device=device).to(dtype)
        y = ops.layer_norm(x, weight, bias, backend="triton")
        torch.testing.assert_close(y, bias.expand(3, n), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_rows_far_from_zero(device, n):
    """Forward and backward, no worse than torch."""
    g = torch.Generator().manual_seed(0)
    rows, dy = (1e4 + 1e-2 * torch.randn(4, n, generator=g)).to(device), torch.randn(4, n, generator=g).to(device)

    def both(function, x, dy):
        x = x.detach().requires_grad_()
        y = function(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    def plain(x):
        return F.layer_norm(x, (n,))

    wanted = both(plain, rows.double(), dy.double())
    made, torchs = both(lambda x: ops.layer_norm(x, backend="triton"), rows, dy), both(plain, rows, dy)
    for ours, theirs, truth in zip(made, torchs, wanted, strict=True):
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (ours, theirs))
        assert error <= max(float(allowed), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_numbers_that_are_none_or_whose_squares_overflow(device):
    """As torch: NaN and infinity take the row; a variance beyond float32 gives zeros."""
    x = torch.ones(4, 333, device=device)
    x[0, 5], x[1, 7], x[2, ::2] = torch.nan, torch.inf, -1e30
    x[3] = 1e30
    y = ops.layer_norm(x, backend="triton")
    assert y[:2].isnan().all()
    assert (y[2:] == 0).all()


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradient_along_the_row_vanishes(device, n):
    """RMSNorm takes the part of the gradient along x out: of dy = x nothing is left."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    weight = torch.ones(n, device=device)
    (dx,) = torch.autograd.grad(ops.rms_norm(x, weight, eps=0.0, backend="triton"), x, x.detach())
    assert dx.abs().max() <= 4e-6 * x.abs().max()


@pytest.mark.compile
@pytest.mark.parametrize(("name", "direction"), KERNELS)
def test_no_approximate_division(name, direction):
    """Triton writes `/` of float32 as div.full, which is off by 2 ULP."""
    from tests.harness.fake_driver import target

    subject = contract(name)
    (op,) = [op for op in subject.raw_ops if op.direction == direction]
    implementation = implementations(op.op, op.direction, op.package)["triton"]
    telling = ("odd_n", "long_row", subject.workloads[0].name)
    texts = []
    for dtype in (subject.dtypes[0], subject.dtypes[-1]):
        for call in declared_calls(subject, op, dtype):
            if call.purpose.partition(":")[0] not in telling:
                continue
            config = implementation.configure(op.bucket_of(call.args, "default"), dtype)
            with target("sm_90") as compiled:
                implementation.launch(call.outputs(), *call.args, config=config)
            texts += [kernel.asm["ptx"] for kernel in compiled]
    assert len(texts) >= 4
    assert any("div.rn.f32" in text for text in texts) or (name, direction) == ("softmax", "bwd")
    assert not [line for text in texts for line in text.splitlines() if "div.full" in line or "div.approx" in line]


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
@pytest.mark.parametrize("device", DEVICES)
def test_without_eps_rows_that_are_none_leave_no_mark(device, name):
    """A program takes several rows; spare rows are zeros, and 1 / 0 would reach the gradient of the weight."""
    n = 96
    for m in (1, 5, 7):
        x, weight = torch.randn(m, n, device=device), torch.randn(n, device=device)
        given = (x, torch.zeros_like(x), weight) if name == "add_rms_norm" else (x, weight)
        found = {}
        for backend in ("triton", "torch"):
            leaves = [t.clone().requires_grad_() for t in given]
            made = getattr(ops, name)(*leaves, eps=0.0, backend=backend)
            y = made if isinstance(made, torch.Tensor) else made[0]
            found[backend] = (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))
        for ours, theirs in zip(*found.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
