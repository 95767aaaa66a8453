"""numerics("deterministic") where torch computes attention: no vendor kernel that adds to a gradient in any order."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import numerics
from tilewright.ops.attention import vendor

HALF = torch.bfloat16


def problem(device="cpu", s_q=16, s_k=32, heads=4, d=16):
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((2, heads, s_q, d), (2, heads, s_k, d), (2, heads, s_k, d))
    q, k, v = (torch.randn(*size, device=device, dtype=HALF, generator=generator) for size in sizes)
    return [t.requires_grad_() for t in (q, k, v)]


def gradients(tensors, **options):
    o = ops.fmha(*tensors, **options)
    return torch.autograd.grad(o, tensors, torch.ones_like(o))


@pytest.fixture
def vendors(monkeypatch):
    """Vendor kernels that compute nothing; counts the backwards."""
    called = []

    def forward(args):
        return torch.zeros_like(args.q), torch.zeros(args.q.shape[:3])

    def backward(args):
        called.append("backward")
        return torch.zeros_like(args.q), torch.zeros_like(args.k), torch.zeros_like(args.v)

    monkeypatch.setattr(vendor, "kernels", lambda _: vendor.Kernels(forward, backward))
    return called


@pytest.mark.parametrize("sinks", [False, True])
def test_the_backward_of_a_vendor_is_not_called(vendors, sinks):
    options = {"backend": "torch", **({"sinks": torch.zeros(4)} if sinks else {})}
    gradients(problem(), **options)
    assert vendors == ["backward"]
    for _ in range(2):  # the second call is a replay
        with numerics("deterministic"):
            gradients(problem(), **options)
    tensors = problem()
    with numerics("deterministic"):
        o = ops.fmha(*tensors, **options)
    o.sum().backward()  # outside of the block, which was the forward's
    assert vendors == ["backward"]


def test_dropout_takes_the_kernel_that_repeats(monkeypatch):
    """Where a gradient is wanted; a forward repeats in any of them."""
    allowed = []

    def sdpa(*args, **kwargs):
        allowed.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return args[0].clone()

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    tensors = problem(s_q=32)
    for mode, grad in (("default", True), ("deterministic", True), ("deterministic", False)):
        with numerics(mode), torch.set_grad_enabled(grad):
            ops.fmha(*tensors, dropout=0.5)
    assert allowed == [(True, True), (False, True), (True, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("left", [None, 700])
def test_gradients_repeat_bit_for_bit(left):
    """FLASH has fewer queries than keys, and its dq is a sum of atomic additions."""
    tensors = problem("cuda", 2048, 4096, 16, 128)
    with numerics("deterministic"):
        runs = [gradients(tensors, mask=masks.window(left), backend="torch") for _ in range(10)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_gradients_under_dropout_repeat_bit_for_bit():
    tensors, runs = problem("cuda", 2048, 2048, 8, 64), []
    for _ in range(5):
        torch.manual_seed(0)
        with numerics("deterministic"):
            runs.append(gradients(tensors, mask=masks.causal(), dropout=0.1))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
