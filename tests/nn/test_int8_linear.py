"""nn.Int8Linear and SmoothQuant: the exact product of cast operands, its gradient, and the life of the weight."""

import copy
import pickle

import pytest
import torch
from torch import nn as torch_nn
from torch.autograd import forward_ad

from tilewright.errors import BackendError, InputError
from tilewright.nn import Int8Linear, RMSNorm, smooth_, smoothing_factors
from tilewright.ops.quant.int8 import quantise_rows

K, N = 72, 40


def pair(dtype=torch.float32, bias=True) -> tuple[torch_nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    linear = torch_nn.Linear(K, N, bias, dtype=dtype)
    return linear, Int8Linear.from_linear(linear)


def restored(x: torch.Tensor) -> torch.Tensor:
    """What is left of x after a cast, in float64."""
    q, scales = quantise_rows(x)
    return q.double() * scales.double()[..., None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_forward_is_the_product_of_cast_operands(dtype, bias):
    linear, ours = pair(dtype, bias)
    x = torch.randn(3, 5, K).to(dtype)
    exact = restored(x) @ restored(linear.weight.detach()).T + (linear.bias.double() if bias else 0)
    got = ours(x)
    assert (got.dtype, got.shape) == (dtype, (3, 5, N))
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-6}[dtype]
    assert ((got.double() - exact).abs() <= step * exact.abs() + 1e-5 * exact.abs().amax()).all()


@pytest.mark.parametrize("shape", [(K,), (1, K), (0, K), (2, 0, K)])
def test_vectors_and_no_rows(shape):
    _, ours = pair()
    x = torch.randn(shape)
    assert torch.equal(ours(x), ours(x.reshape(-1, K)).view(*shape[:-1], N))


def test_views_give_the_same_bits():
    _, ours = pair()
    wide = torch.randn(K, 6)
    assert torch.equal(ours(wide.T), ours(wide.T.contiguous()))


def test_gradient_passes_straight_through():
    _, ours = pair()
    x = torch.randn(2, 3, K, requires_grad=True)
    dz = torch.randn(2, 3, N, requires_grad=True)
    dx, dbias = torch.autograd.grad(ours(x), (x, ours.bias), dz, create_graph=True)
    weight = ours.weight.double() * ours.weight_scale.double()[:, None]
    torch.testing.assert_close(dx.double(), dz.double() @ weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dbias, dz.sum((0, 1)))
    v = torch.randn_like(x)
    (ddz,) = torch.autograd.grad(dx, dz, v)
    torch.testing.assert_close(ddz.double(), v.double() @ weight.T, rtol=1e-5, atol=1e-6)


def test_forward_mode_is_refused():
    _, ours = pair()
    with forward_ad.dual_level(), pytest.raises(InputError, match="Int8Linear has no forward-mode derivative"):
        ours(forward_ad.make_dual(torch.randn(2, K), torch.randn(2, K)))


def test_autocast_names_the_dtype_of_the_result():
    _, ours = pair()
    x = torch.randn(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(x)
    assert torch.equal(got, ours(x).to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo, about itself
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_without_a_graph_break(grad):
    ours = pair()[1].requires_grad_(False)
    x = torch.randn(3, K, requires_grad=grad)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    torch.testing.assert_close(got, ours(x))
    if grad:
        (dx,), (expected,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(ours(x).sum(), x)
        torch.testing.assert_close(dx, expected)


def test_state_dict_both_ways():
    linear, ours = pair()
    x = torch.randn(4, K)
    fresh = Int8Linear(K, N)
    fresh.load_state_dict(ours.state_dict())
    assert torch.equal(fresh(x), ours(x))
    from_torch = Int8Linear(K, N)
    from_torch.load_state_dict(linear.state_dict())
    assert torch.equal(from_torch(x), ours(x))
    assert not torch.equal(Int8Linear(K, N)(x), ours(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(copied):
    _, ours = pair()
    x = torch.randn(4, K)
    assert torch.equal(copied(ours)(x), ours(x))


def test_moves_keep_weight_and_scales():
    _, ours = pair()
    scales = ours.weight_scale.clone()
    ours.to(torch.bfloat16)
    assert (ours.weight.dtype, ours.bias.dtype) == (torch.int8, torch.bfloat16)
    assert torch.equal(ours.weight_scale, scales)
    assert ours.to("meta").weight_scale.is_meta and ours.weight.is_meta


def test_bad_inputs():
    _, ours = pair()
    with pytest.raises(InputError, match=rf"needs \(\.\.\., {K}\)"):
        ours(torch.ones(2, K + 1))
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        ours(torch.ones(2, K, dtype=torch.float64))
    with pytest.raises(InputError, match=r"weight is torch\.float64"):
        Int8Linear.from_linear(torch_nn.Linear(4, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="131072 inputs; sums of int32 hold 131071"):
        Int8Linear.from_linear(torch_nn.Linear(2**17, 1))


def test_a_backend_is_strict():
    linear, _ = pair()
    with pytest.raises(BackendError, match=r"per_token_cast_to_int8\[triton\]"):
        Int8Linear.from_linear(linear, backend="triton")(torch.ones(2, K))
    torch_only = Int8Linear.from_linear(linear, backend="torch")
    assert torch.equal(torch_only(torch.ones(2, K)), Int8Linear.from_linear(linear)(torch.ones(2, K)))


def outliers(offset: float) -> tuple[RMSNorm, list[torch_nn.Linear], torch.Tensor]:
    torch.manual_seed(0)
    norm = RMSNorm(K, offset=offset)
    with torch.no_grad():
        norm.weight.add_(torch.rand(K)).index_fill_(0, torch.tensor([3, 17]), 60.0)
    return norm, [torch_nn.Linear(K, N), torch_nn.Linear(K, 8, bias=False)], torch.randn(64, K)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_smoothing_changes_no_result_and_lowers_the_error_of_int8(offset):
    norm, linears, x = outliers(offset)
    with torch.no_grad():
        exact = [linear(norm(x)) for linear in linears]
        before = [Int8Linear.from_linear(linear)(norm(x)) for linear in linears]
        factors = smooth_(norm, linears, norm(x).abs().amax(0))
        assert factors.max() > 2 * factors.median()
        for linear, y, rough in zip(linears, exact, before, strict=True):
            torch.testing.assert_close(linear(norm(x)), y, rtol=1e-4, atol=1e-3)
            assert (Int8Linear.from_linear(linear)(norm(x)) - y).norm() < 0.5 * (rough - y).norm()


def test_layer_norm_with_a_bias_is_smoothed():
    torch.manual_seed(0)
    norm, linear, x = torch_nn.LayerNorm(K), torch_nn.Linear(K, N), torch.randn(9, K)
    torch_nn.init.normal_(norm.bias)
    exact = linear(norm(x)).detach()
    smooth_(norm, [linear], torch.rand(K) + 0.1, alpha=0.8)
    torch.testing.assert_close(linear(norm(x)).detach(), exact, rtol=1e-4, atol=1e-4)


def test_factors_by_hand():
    x_amax, w_amax = torch.tensor([4.0, 0.0, 16.0, torch.inf]), torch.tensor([1.0, 2.0, 0.0, 1.0])
    assert smoothing_factors(x_amax, w_amax).tolist() == [2.0, 1.0, 1.0, 1.0]
    assert smoothing_factors(torch.tensor([16.0]), torch.tensor([4.0]), 0.25).item() == pytest.approx(2 / 4**0.75)


def test_smoothing_refuses_what_it_cannot_know():
    norm, linears, x = outliers(0.0)
    amax = x.abs().amax(0)

    class Unknown(torch_nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch_nn.Parameter(torch.ones(K))

    with pytest.raises(InputError, match="norm is Unknown, which may multiply"):
        smooth_(Unknown(), linears, amax)
    smooth_(Unknown(), linears, amax, offset=0.0)
    with pytest.raises(InputError, match="share their weight"):
        smooth_(norm, [linears[0], linears[0]], amax)
    with pytest.raises(InputError, match=rf"needs \(N, {K}\)"):
        smooth_(norm, [torch_nn.Linear(5, 5)], amax)
    with pytest.raises(InputError, match="linears is empty"):
        smooth_(norm, [], amax)
    with pytest.raises(InputError, match="alpha is 2"):
        smooth_(norm, linears, amax, alpha=2)
