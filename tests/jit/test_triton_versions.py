"""What holds with every version of Triton: who launches, and which arithmetic kernels ask for."""

import pytest
import torch
from tests.harness.kernels import row_sum_kernel
from triton.runtime.jit import JITFunction

from tilewright.jit import triton_compile, triton_launch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.log import forget_logged


class OnAGpu:
    """As much of a tensor on a GPU as a launch asks for."""

    device, dtype = torch.device("cuda", 0), torch.float32

    def data_ptr(self):
        return 256


@pytest.mark.parametrize("known", [True, False])
def test_a_launcher_that_is_not_known_is_left_to_triton(known, monkeypatch, caplog):
    """Triton 3.7 has a launcher of the same name that takes other arguments."""
    runs = []
    monkeypatch.setattr(triton_compile, "SUPPORTED", known)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "_launchable", lambda: False)
    monkeypatch.setattr(triton_launch, "_current_stream", lambda index: 0)
    monkeypatch.setattr(triton_launch, "_of_triton", lambda compiled: triton_launch._Ready(lambda *args: None, 0, ()))
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, warmup, **options: runs.append(warmup))
    kernel = TritonKernel(row_sum_kernel)
    forget_logged()
    with caplog.at_level("INFO", logger="tilewright"):
        for _ in range(2):
            kernel((8,), (OnAGpu(), OnAGpu(), 4096), (1024,), num_warps=4)
    assert caplog.text.count("launches kernels itself") == (not known)
    assert runs == ([True] if known else [False, False]), "compiled once for our launcher, or launched"


def test_products_and_sums_are_fused_unless_a_kernel_says_otherwise(monkeypatch):
    """The default of Triton 3.10 is another one, and 3.9 warns of it."""
    fused = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: fused.append(options["enable_fp_fusion"]))
    for options in ({}, {"enable_fp_fusion": False}):
        TritonKernel(row_sum_kernel, **options)(
            (8,), (torch.zeros(8, 4096), torch.zeros(8), 4096), (1024,), num_warps=4
        )
    assert fused == [True, False]
