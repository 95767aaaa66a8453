"""Rotated and smoothed layers: the same product before the rounding, less rounding where channels have outliers."""

import pytest
import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.nn import Int8Linear, WeightOnlyLinear, smoothing_factors
from tilewright.nn.rotation import rotate, unrotatable
from tilewright.nn.smoothing import observed_amax


def relative(made: Tensor, wanted: Tensor) -> float:
    return float((made - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("k", [64, 192, 11 * 16, 3584])
def test_a_rotation_is_symmetric_and_orthogonal(k: int) -> None:
    """Blocks: all of 64, 192 and 3584; 16 of 176."""
    x, y = torch.randn(2, 3, k, dtype=torch.float64)
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close(rotate(x) @ y.T, x @ rotate(y).T)
    torch.testing.assert_close(rotate(x).norm(dim=1), x.norm(dim=1))


def test_sizes_that_no_rotation_fits() -> None:
    assert [k for k in (16, 20, 40, 36, 144, 192, 11008) if unrotatable(k)] == []
    assert unrotatable(8 * 11) == "88 inputs; a rotation needs a multiple of 16, or of 20, 28 or 36"
    with pytest.raises(InputError, match="88 inputs; a rotation needs"):
        WeightOnlyLinear.from_linear(nn.Linear(88, 8), "int4", rotate=True)
    with pytest.raises(InputError, match="88 inputs; a rotation needs"):
        Int8Linear(88, 8, rotate=True)


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4", "nvfp4"])
def test_a_rotated_weight_is_the_rotated_weight(format: str) -> None:
    linear = nn.Linear(192, 40)
    layer = WeightOnlyLinear.from_linear(linear, format, rotate=True)
    x = torch.randn(2, 5, 192)
    wanted = nn.functional.linear(rotate(x), layer.dequantize(torch.float32), linear.bias)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert relative(layer(x), linear(x)) < {"int8": 0.01, "int4": 0.12, "mxfp4": 0.2, "nvfp4": 0.15}[format]
    loaded = WeightOnlyLinear(192, 40, format=format, rotate=True)
    loaded.load_state_dict(linear.state_dict())
    assert torch.equal(loaded(x), layer(x))
    again = WeightOnlyLinear(192, 40, format=format, rotate=True)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


def with_outliers(k: int = 192) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, k)
    x[:, 5] *= 100
    return nn.Linear(k, 48), x


def test_outliers_of_a_channel_are_spread_or_moved() -> None:
    linear, x = with_outliers()
    factors = smoothing_factors(x.abs().amax(0), linear.weight.detach().abs().amax(0))
    layers = (
        Int8Linear.from_linear(linear),
        Int8Linear.from_linear(linear, rotate=True),
        Int8Linear.from_linear(linear, smooth=factors),
    )
    with torch.no_grad():
        plain, rotated, smoothed = (relative(layer(x), linear(x)) for layer in layers)
    assert rotated < plain / 2
    assert smoothed < plain / 2


@pytest.mark.parametrize("way", ["rotate", "smooth"])
def test_an_int8_layer_keeps_what_it_does_before_the_cast(way: str) -> None:
    linear, x = with_outliers(48)
    given = {"rotate": True} if way == "rotate" else {"smooth": torch.linspace(0.5, 2.0, 48)}
    layer = Int8Linear.from_linear(linear, **given)
    other = Int8Linear(48, 48, **dict.fromkeys(given, True))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert way in repr(layer)
    other.load_state_dict({**layer.state_dict(), "weight": linear.weight, "weight_scale": layer.weight_scale})
    assert torch.equal(other(x), layer(x))
    half = layer.to(torch.bfloat16)
    assert half.weight_scale.dtype == torch.float32
    assert half.smooth is None or half.smooth.dtype == torch.float32

    x.requires_grad_()
    other(x).backward(torch.ones(64, 48))
    straight = linear.weight.detach().sum(0).expand(64, -1)
    assert relative(x.grad, straight) < 0.02


def test_a_smooth_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"smooth is \(3,\); needs \(48,\)"):
        Int8Linear.from_linear(nn.Linear(48, 8), smooth=torch.ones(3))


def test_calibration_sees_every_call_and_no_other_layer() -> None:
    first, second, unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
    x = torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.5, 1.0, -4.0, 0.0]])
    amax = observed_amax({"a": first, "b": second, "c": unused}, lambda: [second(input=first(row)) for row in x])
    assert torch.equal(amax["a"], torch.tensor([1.0, 2.0, 4.0, 3.0]))
    torch.testing.assert_close(amax["b"], first(x).abs().amax(0))
    assert torch.equal(amax["c"], torch.zeros(4))
    assert not first._forward_pre_hooks
