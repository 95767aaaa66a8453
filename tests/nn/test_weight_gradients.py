"""Layers that add to float32 gradients in place write them in `backward()` alone, and only where autograd would."""

import pytest
import torch
from torch.autograd import forward_ad

import tilewright.nn as nn
from tilewright.errors import InputError

HALF = torch.bfloat16
K, N = 64, 48
LAYERS = {"Linear": nn.Linear, "FP8Linear": nn.FP8Linear}
each_layer = pytest.mark.parametrize("kind", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])


def layer_of(kind: str, dtype: torch.dtype = HALF) -> torch.nn.Linear:
    torch.manual_seed(0)
    return LAYERS[kind](K, N, dtype=dtype, grad_dtype=torch.float32)


def loss_of(layer, seed: int = 1):
    """(loss, x): a linear loss, so that its gradients do not depend on the result."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, K, generator=g).to(layer.weight.dtype).requires_grad_()
    return (layer(x).float() * torch.randn(8, N, generator=g)).sum(), x


def gradient_of(kind: str, dtype: torch.dtype = HALF, seed: int = 1):
    """The gradient that `backward()` leaves in a fresh layer's weight."""
    layer = layer_of(kind, dtype)
    loss_of(layer, seed)[0].backward()
    assert layer.weight.grad.dtype == torch.float32
    return layer.weight.grad


@each_layer
@pytest.mark.parametrize("began", [False, True], ids=["no gradient yet", "a gradient so far"])
def test_gradients_of_other_tensors_leave_the_weights_alone(kind, began):
    layer = layer_of(kind)
    if began:
        loss_of(layer)[0].backward()
    before = layer.weight.grad.clone() if began else None

    def unchanged():
        return layer.weight.grad is None if before is None else torch.equal(layer.weight.grad, before)

    loss, x = loss_of(layer)
    (dx,) = torch.autograd.grad(loss, x)
    assert unchanged()
    loss, x = loss_of(layer)
    loss.backward(inputs=[x])
    assert unchanged()
    assert torch.equal(x.grad, dx)
    loss, _ = loss_of(layer)
    (dbias,) = torch.autograd.grad(loss, layer.bias)
    assert unchanged()
    assert dbias.dtype == torch.float32


@each_layer
@each_dtype
@pytest.mark.parametrize("began", [False, True], ids=["no gradient yet", "a gradient so far"])
def test_autograd_grad_returns_the_gradient_of_the_weight(kind, dtype, began):
    layer, wanted = layer_of(kind, dtype), gradient_of(kind, dtype)
    if began:
        loss_of(layer)[0].backward()
    loss, x = loss_of(layer)
    dx, dweight = torch.autograd.grad(loss, (x, layer.weight))
    assert dweight.dtype == torch.float32
    assert torch.equal(dweight, wanted)
    assert dx is not None
    assert layer.weight.grad is None if not began else torch.equal(layer.weight.grad, wanted)


@each_layer
def test_backward_to_the_weight_alone_adds_to_its_gradient(kind):
    layer, one = layer_of(kind), gradient_of(kind)
    for _ in range(2):
        loss, x = loss_of(layer)
        loss.backward(inputs=[layer.weight])
        assert x.grad is None
        assert layer.bias.grad is None
    torch.testing.assert_close(layer.weight.grad, 2 * one)


@each_layer
def test_a_graph_that_is_kept_adds_once_a_pass(kind):
    layer, one = layer_of(kind), gradient_of(kind)
    loss, x = loss_of(layer)
    loss.backward(retain_graph=True)
    place = layer.weight.grad.data_ptr()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * one)
    assert layer.weight.grad.data_ptr() == place


@each_layer
@pytest.mark.parametrize("began", [False, True], ids=["no gradient yet", "a gradient so far"])
def test_one_weight_in_two_places_of_a_graph(kind, began):
    layer = layer_of(kind)
    wanted = gradient_of(kind, seed=1) + gradient_of(kind, seed=2)
    if began:
        loss_of(layer, seed=1)[0].backward()
        wanted = wanted + gradient_of(kind, seed=1)
    (loss_of(layer, seed=1)[0] + loss_of(layer, seed=2)[0]).backward()
    torch.testing.assert_close(layer.weight.grad, wanted)


@each_layer
@each_dtype
def test_a_weight_that_torch_multiplies_too(kind, dtype):
    layer = layer_of(kind, dtype)
    wanted = 2 * gradient_of(kind, dtype) + 3.0
    loss_of(layer)[0].backward()
    (loss_of(layer)[0] + 3.0 * layer.weight.float().sum()).backward()
    torch.testing.assert_close(layer.weight.grad, wanted)


@each_layer
def test_hooks_see_the_gradient_of_one_pass_and_may_change_it(kind):
    layer, one, seen = layer_of(kind), gradient_of(kind), []
    loss_of(layer)[0].backward()
    handle = layer.weight.register_hook(lambda g: (seen.append(g.clone()), 3 * g)[1])
    loss_of(layer)[0].backward()
    handle.remove()
    assert torch.equal(seen[0], one)
    torch.testing.assert_close(layer.weight.grad, 4 * one)


@each_layer
def test_hooks_after_accumulation_see_the_whole_gradient(kind):
    layer, one, seen = layer_of(kind), gradient_of(kind), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        loss_of(layer)[0].backward()
    assert torch.equal(seen[0], one)
    torch.testing.assert_close(seen[1], 2 * one)


@each_layer
def test_under_autocast(kind):
    layer = layer_of(kind, torch.float32)
    with torch.autocast("cpu", HALF):
        loss, _ = loss_of(layer)
    (dweight,) = torch.autograd.grad(loss, layer.weight)
    assert dweight.dtype == torch.float32
    assert layer.weight.grad is None
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            loss, _ = loss_of(layer)
        loss.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * dweight)


def test_second_derivatives_are_torchs():
    """A gradient penalty: the gradient of |dx|^2 reaches the weight through dx = dy @ weight."""
    layer = layer_of("Linear", torch.float32)
    theirs = torch.nn.Linear(K, N)
    theirs.load_state_dict(layer.state_dict())
    results = []
    for each in (layer, theirs):
        x = torch.linspace(-1, 1, 5 * K).view(5, K).requires_grad_()
        y = torch.tanh(each(x))
        dx, dweight = torch.autograd.grad(y.square().sum(), (x, each.weight), create_graph=True)
        (dx.square().sum() + dweight.square().sum()).backward()
        results.append((dx, dweight, each.weight.grad, each.bias.grad, x.grad))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_second_derivatives_where_the_incoming_gradient_has_none():
    """create_graph with a constant gradient: dx depends on the weight all the same."""
    layer = layer_of("Linear", torch.float32)
    x, dy = torch.randn(5, K, requires_grad=True), torch.randn(5, N)
    (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    assert dx.requires_grad
    (second,) = torch.autograd.grad(dx.square().sum(), layer.weight)
    torch.testing.assert_close(second, 2 * dy.T @ dx.detach(), rtol=1e-4, atol=1e-4)


def test_float8_has_no_second_derivative():
    layer = nn.FP8Linear(K, N)
    x = torch.randn(5, K, requires_grad=True)
    first = torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias), create_graph=True)
    for gradient in first:
        with pytest.raises(InputError, match="FP8Linear has no second derivative"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("wide", [False, True])
def test_forward_mode(wide):
    layer = nn.Linear(K, N, grad_dtype=torch.float32 if wide else None)
    x, tangent = torch.randn(5, K), torch.randn(5, K)
    wanted = tangent @ layer.weight.detach().T
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    made = torch.func.jvp(layer, (x,), (tangent,))[1]
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_float8_refuses_tangents(frozen, grad):
    layer = nn.FP8Linear(K, N).requires_grad_(grad)
    layer = layer.freeze() if frozen else layer
    x, tangent = torch.randn(5, K), torch.randn(5, K)
    with forward_ad.dual_level(), pytest.raises(InputError, match="FP8Linear has no forward-mode derivative"):
        layer(forward_ad.make_dual(x, tangent))
    with pytest.raises(InputError, match="FP8Linear has no forward-mode derivative"):
        torch.func.jvp(layer, (x,), (tangent,))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # streams are what this is about
@each_layer
def test_streams_of_one_pass_add_one_after_another(kind):
    """Four streams use one weight; what they add in place, and what autograd adds, is ordered, and `backward` waits."""
    layer = LAYERS[kind](1024, 1024, dtype=HALF, device="cuda", grad_dtype=torch.float32)
    streams = [torch.cuda.Stream() for _ in range(4)]
    x = torch.randn(4096, 1024, device="cuda").to(HALF)

    def one_pass():
        parts = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                parts.append(layer(x).float().sum())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        (sum(parts) + layer.weight.float().sum()).backward()
        return layer.weight.grad.clone()

    one_pass()
    torch.cuda.synchronize()
    layer.weight.grad.zero_()
    torch.cuda.synchronize()
    first = one_pass()
    torch.cuda.synchronize()
    reference = x.float().sum(0) * len(streams) + 1.0
    assert (first[0] - reference).norm() < 5e-2 * reference.norm()
    for _ in range(20):
        layer.weight.grad.zero_()
        assert (one_pass() - first).norm() < 1e-5 * first.norm()
