"""Kernels first launched from new threads, by autograd's threads too, and on two devices from one process."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.dispatch.backends import missing

pytestmark = pytest.mark.gpu

FIRST_CALLS = {
    "cuda": ("matmul", "bmm", "fmha", "grouped_matmul", "scaled_matmul", "weight_only_matmul"),
    "triton": ("rms_norm", "matmul", "fmha", "softmax", "per_token_cast_to_fp8", "merge_states"),
    "cutile": ("rms_norm", "silu_and_mul", "apply_rope", "softmax", "matmul", "fmha"),
}


@pytest.mark.parametrize("backend", FIRST_CALLS)
def test_eight_new_threads_make_the_first_calls(backend):
    """In a process where nothing was loaded before."""
    if backend != "triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if missing(backend, "cuda") is not None:
        pytest.skip(f"{backend} {missing(backend, 'cuda')}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.first_calls", backend, *FIRST_CALLS[backend]],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_new_thread_on_a_new_stream_launches_what_the_main_thread_loaded():
    """cuda-core's face of a stream is made in the thread that uses the stream first."""
    a = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    wanted = ops.matmul(a, b, backend="cuda")
    torch.cuda.synchronize()
    made = []

    def work():
        stream = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
        with torch.cuda.stream(stream):
            made.append(ops.matmul(a, b, backend="cuda"))
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(made) == 8
    assert all(torch.equal(y, wanted) for y in made)


@pytest.mark.parametrize("backend", ["cuda", "triton", "cutile"])
def test_every_device_runs_kernels_that_another_one_loaded_first(backend):
    """With device 0 current throughout: outputs, gradients and a second call, which has a tape elsewhere."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    shape = (1, 4, 200, 64)
    for device in ("cuda:0", "cuda:1"):
        q, k, v, do = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        wanted = torch.autograd.grad(ops.fmha(*exact, causal=True, backend="torch"), exact, do.double())
        leaves = [t.requires_grad_() for t in (q, k, v)]
        for _ in range(3):
            o = ops.fmha(*leaves, causal=True, backend=backend)
            for ours, theirs in zip(torch.autograd.grad(o, leaves, do), wanted, strict=True):
                assert ours.device == torch.device(device)
                assert (ours.double() - theirs).norm() < 0.02 * theirs.norm()
    assert torch.cuda.current_device() == 0


def test_a_profiled_triton_kernel_runs_where_its_tensors_are():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from triton import knobs

    x = torch.randn(64, 512, device="cuda:1")
    wanted = tw.ops.softmax(x, backend="torch")
    calls = []
    knobs.runtime.launch_enter_hook.add(calls.append)
    try:
        made = tw.ops.softmax(x, backend="triton")
    finally:
        knobs.runtime.launch_enter_hook.remove(calls.append)
    torch.cuda.synchronize(1)
    assert torch.allclose(made, wanted, atol=1e-6)
