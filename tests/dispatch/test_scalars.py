"""Scalars of raw ops: Python's numbers, whatever kind of number was given."""

import numpy as np
import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract
from tilewright.dispatch.arguments import as_declared
from tilewright.errors import InputError

X, W = torch.randn(4, 64), torch.randn(64)
RMS_NORM = contract("rms_norm").forward


@pytest.mark.parametrize("eps", [1, np.float32(1e-3), np.float64(1e-3), np.float16(1e-3), np.int64(1), True + 0])
def test_a_number_of_another_kind_is_a_float(eps):
    made = as_declared(RMS_NORM, (X, W, eps, 0, False))
    assert [type(value) for value in made[2:]] == [float, float, bool]
    assert made[2] == float(eps)
    torch.testing.assert_close(ops.rms_norm(X, W, eps=eps), ops.rms_norm(X, W, eps=float(eps)))


@pytest.mark.parametrize("flag", [np.bool_(True), 1, True])
def test_a_flag_of_another_kind_is_a_bool(flag):
    assert as_declared(RMS_NORM, (X, W, 1e-6, 0.0, flag))[4] is True


@pytest.mark.parametrize("eps", [torch.tensor(1e-3), "1e-3", None, 1j, True])
def test_what_is_no_number_is_refused_by_name(eps):
    with pytest.raises(InputError, match="rms_norm: eps is a .*; needs a number"):
        ops.rms_norm(X, W, eps=eps)


def test_what_is_no_integer_is_refused_by_name():
    q, cos, sin = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    with pytest.raises(InputError, match="apply_rope: rotary_dim is a float; needs an integer"):
        ops.apply_rope(q, q, cos, sin, rotary_dim=8.0)
    with pytest.raises(InputError, match="interleaved is a int; needs True or False"):
        ops.apply_rope(q, q, cos, sin, interleaved=2)
    expected = ops.apply_rope(q, q, cos, sin, rotary_dim=8)
    torch.testing.assert_close(ops.apply_rope(q, q, cos, sin, rotary_dim=np.int64(8)), expected)


def test_sizes_of_a_compiled_graph_pass():
    made = torch.compile(lambda x: ops.rms_norm(x, W, eps=1), backend="eager", fullgraph=True, dynamic=True)(X)
    torch.testing.assert_close(made, ops.rms_norm(X, W, eps=1.0))
