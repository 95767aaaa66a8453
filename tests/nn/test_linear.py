"""nn.Linear takes the place of torch.nn.Linear, and sums weight gradients in float32 where it is asked to."""

import copy

import pytest
import torch
from torch import nn as torch_nn

import tilewright.nn as nn
from tilewright.errors import InputError

HALF = torch.bfloat16
K, N, MICRO_BATCHES = 64, 48, 32


def pair(dtype=HALF, **options):
    """torch's layer and ours, with the same parameters."""
    theirs = torch_nn.Linear(K, N, dtype=dtype)
    ours = nn.Linear(K, N, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("bias", [True, False])
def test_the_state_dict_is_torchs(bias):
    theirs = torch_nn.Linear(K, N, bias)
    ours = nn.Linear(K, N, bias)
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]
    assert isinstance(ours, torch_nn.Linear)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, K)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_results_and_gradients_are_torchs(dtype):
    theirs, ours = pair(dtype)
    x = torch.randn(2, 3, K).to(dtype)
    for layer in (theirs, ours):
        layer.x = x.clone().requires_grad_()
        layer.y = layer(layer.x)
        layer.y.float().square().sum().backward()
    torch.testing.assert_close(ours.y, theirs.y)
    for name in ("x", "weight", "bias"):
        torch.testing.assert_close(getattr(ours, name).grad, getattr(theirs, name).grad)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_an_activation(activation):
    theirs, ours = pair(torch.float32, activation=activation)
    function = {
        "relu": torch.relu,
        "silu": torch_nn.functional.silu,
        "gelu": lambda t: torch_nn.functional.gelu(t, approximate="tanh"),
    }[activation]
    x = torch.randn(5, K)
    wanted = function(theirs(x))
    torch.testing.assert_close(ours(x), wanted)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), wanted)
    wanted.sum().backward()
    ours(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_gate_halves_the_columns(grad_dtype):
    theirs, ours = pair(torch.float32, activation="swiglu", grad_dtype=grad_dtype)
    x = torch.randn(5, K)
    z = theirs(x)
    wanted = torch_nn.functional.silu(z[:, 0::2]) * z[:, 1::2]
    torch.testing.assert_close(ours(x), wanted)
    wanted.sum().backward()
    ours(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_autocast_is_torchs(grad_dtype):
    theirs, ours = pair(torch.float32, grad_dtype=grad_dtype)
    x = torch.randn(5, K)
    with torch.autocast("cpu", HALF):
        made, wanted = ours(x), theirs(x)
    assert made.dtype == wanted.dtype == HALF
    torch.testing.assert_close(made, wanted)
    made.sum().backward(), wanted.sum().backward()
    assert ours.weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0.01, atol=0.01)


def accumulated(layer, batches):
    """The weight gradient after every micro-batch's backward; losses are linear, so batches are independent."""
    for x, dy in batches:
        (layer(x) * dy).sum().backward()
    return layer.weight.grad


def micro_batches():
    return [(torch.randn(16, K).to(HALF), torch.randn(16, N).to(HALF)) for _ in range(MICRO_BATCHES)]


def relative_error(made, exact):
    return float((made.double() - exact).norm() / exact.norm())


def test_micro_batches_accumulate_as_in_float32():
    """Closer to float64 than a sum in bf16 by more than an order of magnitude: 32 roundings to 8 bits are gone."""
    batches = micro_batches()
    exact = sum(dy.double().T @ x.double() for x, dy in batches)
    theirs, ours = pair(grad_dtype=torch.float32)
    wide, half = accumulated(ours, batches), accumulated(theirs, batches)
    assert wide.dtype == torch.float32
    assert relative_error(wide, exact) < 1e-6
    assert relative_error(half, exact) > 1e-3
    assert torch.equal(wide, accumulated(copy.deepcopy(pair(grad_dtype=torch.float32)[1]), batches))


def test_the_gradient_so_far_is_written_in_place():
    _, layer = pair(grad_dtype=torch.float32)
    first, *others = micro_batches()[:3]
    total = accumulated(layer, [first])
    again = accumulated(layer, others)
    assert again is total
    assert layer.bias.grad.dtype == torch.float32
    assert layer.weight.dtype == HALF


def test_what_does_not_learn_gets_nothing():
    _, layer = pair(grad_dtype=torch.float32)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, K).to(HALF).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, torch.ones(4, N).to(HALF) @ layer.weight)
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_an_optimizer_takes_it():
    """AdamW on the master copy of the weights reads the float32 gradient."""
    _, layer = pair(grad_dtype=torch.float32)
    master = layer.weight.detach().float().clone().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=0.1)
    before = master.detach().clone()
    accumulated(layer, micro_batches()[:2])
    master.grad = layer.weight.grad
    optimizer.step()
    assert not torch.equal(master, before)


def test_wrong_use_is_refused():
    with pytest.raises(InputError, match="grad_dtype is torch.float16; allowed are None and torch.float32"):
        nn.Linear(K, N, grad_dtype=torch.float16)
    with pytest.raises(InputError, match="activation is 'tanh'"):
        nn.Linear(K, N, activation="tanh")(torch.ones(1, K))
    with pytest.raises(InputError, match="agree in K"):
        nn.Linear(K, N)(torch.ones(1, K + 1))


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_options_are_checked_as_the_layer_is_made(grad_dtype):
    for activation in ("tanh", ""):
        with pytest.raises(InputError, match=f"activation is '{activation}'; allowed are None, 'relu', 'gelu'"):
            nn.Linear(K, N, activation=activation, grad_dtype=grad_dtype)
    with pytest.raises(InputError, match=r"out_features is 5; it must be even"):
        nn.Linear(K, 5, activation="swiglu", grad_dtype=grad_dtype)


def test_a_weight_that_cannot_hold_a_float32_gradient_is_refused():
    _, layer = pair(torch.float32, grad_dtype=torch.float32)
    torch_nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(InputError, match="grad_dtype needs weight to be a parameter"):
        layer(torch.ones(1, K))
    _, layer = pair(torch.float64, grad_dtype=torch.float32)
    with pytest.raises(InputError, match=r"weight is torch.float64, and grad_dtype is narrower"):
        layer(torch.ones(1, K).double())


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_vector_is_one_row(grad_dtype):
    theirs, ours = pair(torch.float32, grad_dtype=grad_dtype)
    x = torch.randn(K)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).square().sum().backward(), theirs(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_sizes_without_memory():
    x = torch.ones(2, 3, K, device="meta", requires_grad=True)
    made = nn.Linear(K, N, device="meta")(x)
    made.sum().backward()
    assert made.shape == (2, 3, N) and x.grad.shape == x.shape


def test_training_in_one_graph():
    theirs, ours = pair(torch.float32, activation="gelu")
    x = torch.randn(5, K)
    torch.compile(ours, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch_nn.functional.gelu(theirs(x), approximate="tanh").sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_around_a_wide_gradient():
    """A graph break, and the same sums."""
    batches = micro_batches()[:4]
    theirs = pair(grad_dtype=torch.float32)[1]
    ours = copy.deepcopy(theirs)
    wanted = accumulated(theirs, batches)
    compiled = torch.compile(ours, backend="aot_eager")
    for x, dy in batches:
        (compiled(x) * dy).sum().backward()
    assert torch.equal(ours.weight.grad, wanted)


def test_it_says_what_it_is():
    said = repr(nn.Linear(K, N, activation="silu", backend="torch", grad_dtype=torch.float32))
    assert "activation=silu, backend=torch, grad_dtype=torch.float32" in said
