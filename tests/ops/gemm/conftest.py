"""Fixtures of this folder."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as being on a Hopper GPU."""
    from tilewright.ops.gemm.kernels.sm90 import operands

    monkeypatch.setattr(operands, "device_info", lambda device: SimpleNamespace(arch="sm_90"))
