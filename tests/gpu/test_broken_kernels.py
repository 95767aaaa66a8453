"""Broken Triton kernels are caught on a GPU, each by the mode that is there for it, and a correct one is not."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from tests.gpu.jit_kernels import Scale, ScaleArgs, scale

from tilewright import ops
from tilewright.dispatch import Workload, contract, register_impl, unregister_impl
from tilewright.jit.compilers.kernel_args import Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.driver import load
from tilewright.validate import check

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Fault:
    """`loud`: plain accuracy sees it, too.   `fools_allclose`: the usual test, with a tolerance of 1e-2, passes it."""

    mode: str
    fools_allclose: bool
    loud: bool = False
    params: dict[str, Any] = field(default_factory=lambda: {"M": 192, "N": 320})
    dtype: torch.dtype = torch.bfloat16


FAULTS = {
    "wrong_tile": Fault("eager", True, loud=True, dtype=torch.float16),
    "missing_tail_mask": Fault("eager", False, loud=True, params={"M": 8, "N": 333}),
    "nan": Fault("eager", False, loud=True),
    "stale_output": Fault("poison", True),
    "mutated_input": Fault("inputs_unchanged", True),
    "wrong_stride": Fault("non_contiguous", True),
    "batch_variant": Fault("batch_invariance", True, dtype=torch.float32),
    "out_of_bounds": Fault("guard_bands", True, params={"M": 5, "N": 333}),
    "wrong_stream": Fault("side_stream", True),
    "cached_by_pointer": Fault("cuda_graph", True),
    "worn_out": Fault("cuda_graph", True),
    "zero_gradient": Fault("backward", False, loud=True),
    "atomic_weight_gradient": Fault("determinism", True, params={"M": 4096, "N": 320}, dtype=torch.float32),
}


def report(name, fault, modes):
    from tests.gpu.broken_kernels import planted

    with planted(name):
        workload = Workload("planted", fault.params)
        return check("rms_norm", workload, modes=modes, backend="triton", dtype=fault.dtype, device="cuda")


@pytest.mark.parametrize("name", FAULTS)
def test_caught_by_the_right_mode(name):
    fault = FAULTS[name]
    made = report(name, fault, [fault.mode])
    assert made.failed_modes == (fault.mode,), str(made)


@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if not f.loud and n != "stale_output"])
def test_accuracy_alone_does_not_see_it(name):
    made = report(name, FAULTS[name], ["eager"])
    assert made.passed, str(made)


@pytest.mark.parametrize("name", FAULTS)
def test_what_plain_allclose_sees(name):
    """Both backends once on contiguous inputs, into one buffer; gradients where the fault is in the backward."""
    from tests.gpu.broken_kernels import planted

    fault = FAULTS[name]
    x, weight = contract("rms_norm").inputs(fault.params, fault.dtype, torch.device("cuda"), 0).args
    with planted(name):
        buffer = ops.rms_norm(x, weight, out=torch.empty_like(x), backend="torch")
        expected = buffer.clone()
        ops.rms_norm(x, weight, out=buffer, backend="triton")
        close = torch.allclose(buffer, expected, 1e-2, 1e-2)
        if fault.mode in ("backward", "determinism"):
            cotangent = torch.randn_like(x)
            ours, theirs = (_gradients(x, weight, cotangent, backend) for backend in ("triton", "torch"))
            # sums over M rows in float32: their tolerance must grow with the terms
            close = all(
                torch.allclose(a, b, 1e-2, 1e-2 * fault.params["M"] ** 0.5) for a, b in zip(ours, theirs, strict=True)
            )
    assert close == fault.fools_allclose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_same_kernels_without_a_fault_pass(dtype):
    made = report("none", Fault("", True, dtype=dtype), "quick")
    assert made.passed, str(made)


SCALE = Scale(128, torch.float32)


class OnlyX(NamedTuple):
    x: Pointer


def not_compiled(x, folder):
    (folder / "scale.cuh").write_text(
        "namespace tilewright { template <class Config> __global__ void scale(float* x) { no }; }"
    )
    broken = CudaKernel(folder / "scale.cuh", "scale", OnlyX, archs=("sm_80", "sm_90", "sm_100"))
    broken((1,), OnlyX(x), SCALE, block=128)


def not_loaded(x, folder):
    load(scale.compile(SCALE).binary, x.get_device(), "absent")


def not_launched(x, folder):
    scale((1,), ScaleArgs(x, x, 2.0, 1.0, True, 1, 0), SCALE, block=128, shared_bytes=300_000)


@pytest.mark.parametrize(
    ("fail", "words"), [(not_compiled, "cannot compile"), (not_loaded, "loading absent"), (not_launched, "shared")]
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_cuda_kernel_that_is_not_compiled_loaded_or_launched_has_failed(fail, words, direction, tmp_path):
    @register_impl("rms_norm", backend="cuda")
    @register_impl("rms_norm", backend="cuda", direction="bwd")
    def launch(outs, *args, config):
        raw = contract("rms_norm").forward if len(outs) == 1 else contract("rms_norm").gradient.op
        if raw.direction == direction:
            fail(torch.ones(4, device="cuda"), tmp_path)
        made = raw.reference(*args)
        for out, value in zip(outs, (made,) if len(outs) == 1 else made, strict=True):
            out.copy_(value)

    mode = "eager" if direction == "fwd" else "backward"
    try:
        made = check("rms_norm", Workload("planted", {"M": 8, "N": 64}), modes=[mode], backend="cuda", device="cuda")
    finally:
        for each in ("fwd", "bwd"):
            unregister_impl("rms_norm", backend="cuda", direction=each)
    assert made.failed_modes == (mode,)
    assert words in str(made)


def _gradients(x, weight, cotangent, backend):
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(ops.rms_norm(*leaves, backend=backend), leaves, cotangent)
