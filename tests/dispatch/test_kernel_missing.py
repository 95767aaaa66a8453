"""A kernel that is in no cache and cannot be compiled: another backend takes the call, unless this one was demanded."""

import logging

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract, register_impl
from tilewright.dispatch.registry import unregister_impl
from tilewright.errors import BackendError, KernelMissingError


@pytest.fixture
def tries():
    """How often a backend was called that has no kernel; it stands first in `auto`'s order."""
    calls = []

    @register_impl("swiglu", backend="unbundled")
    def launch(outs, gate, up, gate_multiplier, limit, *, config):
        calls.append(gate.shape)
        raise KernelMissingError("no kernel in the cache, and no compiler")

    yield calls
    unregister_impl("swiglu", backend="unbundled")


def test_auto_goes_on_without_it_and_does_not_ask_again(tries):
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    expected = ops.swiglu(gate, up, backend="torch")
    for _ in range(3):
        torch.testing.assert_close(ops.swiglu(gate, up), expected)
    out = torch.empty_like(gate)
    ops.swiglu(gate, up, out=out)
    torch.testing.assert_close(out, expected)
    assert len(tries) == 1


def test_out_is_written_by_the_next_one(tries):
    gate, up = torch.randn(4, 5), torch.randn(4, 5)
    out = torch.empty_like(gate)
    ops.swiglu(gate, up, out=out)
    torch.testing.assert_close(out, ops.swiglu(gate, up, backend="torch"))
    assert len(tries) == 1


def test_several_backends_may_lack_their_kernels(tries):
    """Each plan leaves out all that were tried; the second once brought the first back, until the stack was full."""

    @register_impl("swiglu", backend="unbundled_too")
    def launch(outs, gate, up, gate_multiplier, limit, *, config):
        tries.append("too")
        raise KernelMissingError("no kernel in the cache, and no compiler")

    gate, up = torch.randn(3, 7), torch.randn(3, 7)
    try:
        for _ in range(2):
            torch.testing.assert_close(ops.swiglu(gate, up), ops.swiglu(gate, up, backend="torch"))
    finally:
        unregister_impl("swiglu", backend="unbundled_too")
    assert tries == [gate.shape, "too"]


def test_a_strict_wish_is_an_error(tries):
    raw = contract("swiglu").forward
    with pytest.raises(BackendError, match="no kernel in the cache"):
        raw(torch.randn(3, 5), torch.randn(3, 5), 1.0, 0.0, "unbundled!", "default")


def test_a_preference_falls_back_with_a_line(tries, caplog):
    raw = contract("swiglu").forward
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        raw(torch.randn(6, 5), torch.randn(6, 5), 1.0, 0.0, "unbundled", "default")
    assert "falling back: swiglu[unbundled] no kernel in the cache" in caplog.text
