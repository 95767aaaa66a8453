"""What the shared Triton kernels promise beyond the contracts' edge cases, in the interpreter and on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from tilewright.ops.rows import RowsBucket

REFERENCES = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def kernels():
    from tilewright.ops.activation.kernels.triton import gated

    return gated


@pytest.mark.parametrize("device", DEVICES)
def test_every_candidate_computes_the_same_bits(kernels, device):
    """The configuration only divides the work, so a table may name any of them."""
    gate, up, dout = (torch.randn(3, 1200, device=device).bfloat16() for _ in range(3))
    x = torch.cat((gate, up), -1)
    seen = []
    for config in kernels.CONFIGS:
        out, dgate, dup = (torch.full_like(gate, torch.nan) for _ in range(3))
        kernels.split(out, gate, up, "silu", config)
        kernels.split_backward(dgate, dup, dout, gate, up, "silu", config)
        packed, dx = torch.full_like(gate, torch.nan), torch.full_like(x, torch.nan)
        kernels.packed(packed, x, "silu", config)
        kernels.packed_backward(dx, dout, x, "silu", config)
        assert torch.equal(packed, out), config
        assert torch.equal(dx, torch.cat((dgate, dup), -1)), config
        seen.append((out, dgate, dup))
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("act", REFERENCES)
@pytest.mark.parametrize("device", DEVICES)
def test_rounding_points_are_the_models(kernels, device, act):
    """Float32 arithmetic that agrees to a few ULP gives the same bits after equal roundings nearly always."""
    gate, up = (torch.randn(16, 512, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(gate)
    kernels.split(out, gate, up, act, kernels.configure(RowsBucket(16, 512), gate.dtype))
    same = (out == REFERENCES[act](gate) * up).float().mean().item()
    assert same > 0.99


@pytest.mark.parametrize("act", REFERENCES)
@pytest.mark.parametrize("device", DEVICES)
def test_infinite_and_huge_gates_are_as_in_torch(kernels, device, act):
    values = [torch.inf, -torch.inf, torch.nan, 1e4, -1e4, 88.5, -88.5, 104.0, -104.0, 0.0, -0.0]
    gate = torch.tensor(values, device=device)
    up, out = torch.ones_like(gate), torch.empty_like(gate)
    kernels.split(out, gate, up, act, kernels.configure(RowsBucket(1, len(values)), gate.dtype))
    expected = REFERENCES[act](gate.double()).float()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_exact_gelu_keeps_its_digits_in_both_tails(kernels, device):
    """(1 + erf) / 2 has no digit left at -6.  Relative to float64, down to where float32 results end: 24 * 2^-24,
    of which a GPU's two 2^x and its division take half."""
    gate = torch.linspace(-40, 40, 8001, device=device)
    one, out, dgate, dup = (f(gate) for f in (torch.ones_like, torch.empty_like, torch.empty_like, torch.empty_like))
    config = kernels.configure(RowsBucket(1, gate.numel()), gate.dtype)
    kernels.split(out, gate, one, "gelu", config)
    kernels.split_backward(dgate, dup, one, gate, one, "gelu", config)
    x = gate.double().requires_grad_()
    exact = 0.5 * x * torch.special.erfc(-x * 0.5**0.5)  # F.gelu cancels in float64 too
    (slope,) = torch.autograd.grad(exact.sum(), x)
    for ours, wanted in ((out, exact.detach()), (dup, exact.detach()), (dgate, slope)):
        off = (ours.double() - wanted).abs()
        # the slope crosses zero at -0.75, where x times the density cancels the cdf
        assert (off <= 24 * 2**-24 * wanted.abs().clamp_min(1e-37) + (3e-8 if wanted is slope else 0) * (x > -2)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_in_memory_are_read_where_they_are(kernels, device):
    gate, up = (torch.full((6, width), torch.nan, device=device).bfloat16()[:, 7:107].normal_() for width in (130, 190))
    out = torch.empty(6, 100, device=device, dtype=gate.dtype)
    kernels.split(out, gate, up, "silu", kernels.configure(RowsBucket(6, 100), out.dtype))
    assert not out.isnan().any()
    torch.testing.assert_close(out, F.silu(gate) * up)
