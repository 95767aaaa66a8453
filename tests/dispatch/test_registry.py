"""Registrations: the last one runs, and what it took the place of is there again when it is taken out."""

import sys

import pytest
import torch
from tests.harness.registry import own_registry

from tilewright import ops
from tilewright.dispatch import contract, implementations, register_impl, unregister_impl
from tilewright.errors import InputError

RAW = contract("rms_norm").forward
HOME = f"{RAW.package}.kernels.cpu.rms_norm"


def found():
    """What runs for backend "cpu" of rms_norm."""
    return implementations(RAW.op, RAW.direction).get("cpu")


def silent(outs, *args, config):
    """A kernel that writes zeros."""
    outs[0].zero_()


def test_what_a_module_provides_is_there_again():
    own = found()
    assert own.kernel == "cpu.rms_norm"
    register_impl("rms_norm", backend="cpu")(silent)
    assert found().launch is silent
    unregister_impl("rms_norm", backend="cpu")
    assert found() is own
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(ops.rms_norm(x, weight, backend="cpu"), ops.rms_norm(x, weight, backend="torch"))


def test_registrations_are_taken_out_one_by_one():
    own, other = found(), lambda outs, *args, config: None
    register_impl("rms_norm", backend="cpu")(silent)
    register_impl("rms_norm", backend="cpu")(other)
    unregister_impl("rms_norm", backend="cpu")
    assert found().launch is silent
    unregister_impl("rms_norm", backend="cpu")
    assert found() is own


def test_a_module_that_is_imported_later_lies_beneath(monkeypatch):
    """Selection imports a kernel's module for another direction or op while somebody else has its place."""
    with own_registry():
        unregister_impl("rms_norm", backend="cpu")
        register_impl("rms_norm", backend="cpu")(silent)
        monkeypatch.delitem(sys.modules, HOME)
        implementations(RAW.op, "bwd")  # imports what the contract lists, of either direction
        assert found().launch is silent
        unregister_impl("rms_norm", backend="cpu")
        assert found().kernel == "cpu.rms_norm"


@pytest.mark.parametrize(("op", "backend"), [("rms_norm", "abacus"), ("no_such_op", "cpu")])
def test_what_is_not_there_cannot_be_taken_out(op, backend):
    with pytest.raises(InputError, match="unregister_impl"):
        unregister_impl(op, backend=backend)
