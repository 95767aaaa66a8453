"""torch keeps a cuDNN graph for every signature it was given: the reference gives it few, and FLASH the rest."""

from types import SimpleNamespace

import pytest
import torch

from tilewright.ops.attention import vendor
from tilewright.ops.attention.arguments import FmhaArgs

HALF = torch.bfloat16


def tensor(s, d=64):
    """What is asked of a tensor on a GPU before a kernel is chosen."""
    shape = torch.Size((1, 8, s, d))
    return SimpleNamespace(
        device=torch.device("cuda", 0), dtype=HALF, shape=shape, stride=lambda: (8 * s * d, s * d, d, 1)
    )


@pytest.fixture(autouse=True)
def every_kernel(monkeypatch):
    monkeypatch.setattr(vendor, "_given", set())
    monkeypatch.setattr(vendor, "_params", lambda *_: None)
    monkeypatch.setattr(vendor, "can_use_cudnn_attention", lambda _: True)
    monkeypatch.setattr(vendor, "can_use_flash_attention", lambda _: True)


def chosen(s, left=-1, right=0):
    q = tensor(s)
    return vendor.kernels(FmhaArgs(q, q, q, None, None, None, "", left, right, 1.0, 0.0))


def test_many_signatures_leave_a_bounded_number_of_graphs():
    made = [chosen(s) for s in range(512, 6512)]
    assert made.count(vendor.CUDNN) == vendor._SIGNATURES == len(vendor._given)
    assert made.count(vendor.FLASH) == len(made) - vendor._SIGNATURES


def test_a_signature_that_cudnn_had_is_its_own_for_good():
    for s in range(512, 1512):
        chosen(s)
    assert chosen(512) is vendor.CUDNN  # forward and backward, in every later step
    assert chosen(512) is vendor.CUDNN
    assert chosen(1511) is vendor.FLASH


def test_another_mask_or_dtype_is_another_signature():
    chosen(512)
    chosen(512, right=-1)
    assert len(vendor._given) == 2
    q = tensor(512)
    q.dtype = torch.float16
    vendor.kernels(FmhaArgs(q, q, q, None, None, None, "", -1, 0, 1.0, 0.0))
    assert len(vendor._given) == 3
