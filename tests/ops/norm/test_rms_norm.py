"""rms_norm: the code of the models it stands for, bit for bit; the formula of its gradient; its errors."""

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract, implementations
from tilewright.errors import InputError

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def llama(x, weight, eps):
    """LlamaRMSNorm, and those of Qwen, Mistral and DeepSeek."""
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(x.dtype)


def olmo2(x, weight, eps):
    """Olmo2RMSNorm and GptOssRMSNorm: the weight multiplies before the rounding."""
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return (weight * hidden).to(x.dtype)


def gemma(x, weight, eps):
    """GemmaRMSNorm: 1 + weight, in float32."""
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden * (1.0 + weight.float())).type_as(x)


MODELS = {llama: {}, olmo2: {"fp32_weight": True}, gemma: {"offset": 1.0}}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_models_norm_bit_for_bit(dtype, eps, model):
    x, weight = torch.randn(3, 7, 333).to(dtype), torch.randn(333).to(dtype)
    y = ops.rms_norm(x, weight, eps=eps, **MODELS[model], backend="torch")
    assert y.dtype == dtype
    assert torch.equal(y, model(x, weight, eps))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_weight_it_is_llama4s_norm(dtype, backend):
    """Llama4TextL2Norm, and what the float32 form of a weight of ones gives."""
    x = torch.randn(3, 7, 333).to(dtype)
    wanted = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
    y = ops.rms_norm(x, eps=1e-5, backend=backend)
    assert torch.equal(y, ops.rms_norm(x, torch.ones(333), eps=1e-5, fp32_weight=True, backend=backend))
    if backend == "torch":
        assert torch.equal(y, wanted)
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_without_a_weight_has_the_bits_of_a_weight_of_ones(device):
    for n in (333, 20000):
        x, dy = (torch.randn(3, n, generator=torch.Generator().manual_seed(s)).to(device) for s in (0, 1))
        ones = torch.ones(n, device=device)
        results = []
        for weight in (None, ones):
            leaf = x.clone().requires_grad_()
            y = ops.rms_norm(leaf, weight, backend="triton")
            results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
        for plain, weighted in zip(*results, strict=True):
            assert torch.equal(plain, weighted)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_the_models_differ_in_their_rounding(dtype):
    """On the samples above, so that no form can pass for another."""
    x, weight = torch.randn(3, 7, 333).to(dtype), torch.randn(333).to(dtype)
    assert not torch.equal(llama(x, weight, 1e-6), olmo2(x, weight, 1e-6))
    assert not torch.equal(ops.rms_norm(x, weight, eps=1e-6), ops.rms_norm(x, weight, eps=1e-2))


def test_the_dtype_of_the_result():
    """A wider weight promotes it, but for the forms that round once."""
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64)
    assert ops.rms_norm(x, weight).dtype == torch.float32
    assert ops.rms_norm(x, weight, fp32_weight=True).dtype == torch.bfloat16
    assert ops.rms_norm(x, weight, offset=1.0).dtype == torch.bfloat16
    assert torch.equal(ops.rms_norm(x, weight, backend="torch"), llama(x, weight, 1e-6))


def test_an_offset_implies_a_float32_weight():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    implied, said = (ops.rms_norm(x, weight, offset=1.0, fp32_weight=f) for f in (False, True))
    assert torch.equal(implied, said)


def backward(dy, x, weight, eps, offset):
    """The formula that the kernels state."""
    x_hat = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    wdy = (offset + weight) * dy
    rstd = x_hat / x
    return rstd * (wdy - x_hat * (wdy * x_hat).mean(-1, keepdim=True)), (dy * x_hat).sum(0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_gradient_is_that_of_the_formula(offset):
    x, weight, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 96), (96,), (5, 96)))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(ops.rms_norm(*leaves, eps=1e-3, offset=offset), leaves, dy)
    for ours, wanted in zip(found, backward(dy, x, weight, 1e-3, offset), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, eps=1e-3, offset=offset), leaves)


@pytest.mark.parametrize("n", [333, 512, 4096, 20000])  # a masked tail; whole; wide; longer than registers
@pytest.mark.parametrize("device", DEVICES)
def test_gradient_along_the_row_vanishes(device, n):
    """RMSNorm takes the part of the gradient along x out: of dy = x nothing is left."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    weight = torch.ones(n, device=device)
    (dx,) = torch.autograd.grad(ops.rms_norm(x, weight, eps=0.0, backend="triton"), x, x.detach())
    assert dx.abs().max() <= 4e-6 * x.abs().max()


def test_out_is_written():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.full((4, 64), 7.0).bfloat16()
    assert ops.rms_norm(x, weight, out=out) is out
    assert torch.equal(out, ops.rms_norm(x, weight))
    with pytest.raises(InputError, match=r"rms_norm\(out=...\) got \(4, 64\) torch.float32"):
        ops.rms_norm(x, weight, out=torch.empty(4, 64))


def test_errors_say_what_was_given_and_what_is_allowed():
    x = torch.ones(4, 8)
    with pytest.raises(InputError, match=r"rms_norm: weight is \(7,\); needs \(8,\), the last dimension of x"):
        ops.rms_norm(x, torch.ones(7))
    with pytest.raises(InputError, match=r"rms_norm: x is torch\.int32; needs one of bfloat16, float16, float32"):
        ops.rms_norm(x.int(), torch.ones(8))
    with pytest.raises(InputError, match=r"rms_norm: weight is a list; needs a torch\.Tensor\."):
        ops.rms_norm(x, [1.0] * 8)
    with pytest.raises(InputError, match=r"rms_norm: offset is 1 and weight is None; it is added to a weight\."):
        ops.rms_norm(x, offset=1.0)
    with pytest.raises(InputError, match="rms_norm: eps is a Tensor; needs a number"):
        ops.rms_norm(x, torch.ones(8), eps=torch.tensor(1e-6))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_a_bucket_tells_a_weight_that_a_kernel_refuses(name, direction):
    x = torch.ones(4, 8)
    subject = contract(name)
    raw = subject.forward if direction == "fwd" else subject.gradient.op
    tensors = dict.fromkeys(("x", "residual", "dy", "dtotal", "total"), x)
    values = {**tensors, "eps": 1e-6, "offset": 0.0, "fp32_weight": False, "need_dweight": False}
    refuses = implementations(name, direction)["cutile"].supports
    for weight in (torch.ones(8), torch.ones(8).double(), None):
        args = [{**values, "weight": weight}[field] for field in raw.fields]
        assert raw.bucket(*args).plain == (refuses(*args) is None)
