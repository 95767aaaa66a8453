"""Replays, on CPU tensors: stand-ins for device, stream and kernel make every Triton launch tapeable."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from tests.harness.registry import own_registry

import tilewright.ops
from tilewright.dispatch import contract, contracts, implementations, register_impl, replay
from tilewright.jit.tape import Step, taping
from tilewright.jit.triton_launch import TritonKernel

# Calls with lists of tensors are not replayed, nor is an op whose launch reads a tensor made for each call: the mask of
# packed sequences, nor one whose product torch computes
SLOW = {"group_gemm", "fmha_varlen", "block_matmul"}
SIMPLE = [
    name
    for name, c in contracts().items()
    if not name.startswith("test_")
    and name not in SLOW
    and c.forward.compose is None  # whose parts are replayed
    and any(kernel.startswith("triton.") for kernel in c.forward.kernels)
]


@pytest.fixture
def launches(monkeypatch, replay_on_cpu):
    """Kernel launches that were made the ordinary way, and those from a tape."""
    made = {"ordinary": 0, "replayed": 0}

    def call(self, grid, args, constants, *, num_warps, num_stages=1):
        made["ordinary"] += 1
        listening = taping()
        if listening is not None:
            step = lambda *replayed: made.__setitem__("replayed", made["replayed"] + 1)  # noqa: E731
            listening.add(Step(step, (1, 1, 1), None, (), (*args, *constants)))

    monkeypatch.setattr(TritonKernel, "__call__", call)
    return made


@pytest.fixture
def on_cpu():
    """Lets an op's Triton launch run on CPU tensors, as backend "cpu"."""
    registered = []

    def register(name):
        subject = contract(name)
        found = implementations(name, "fwd")["triton"]
        register_impl(name, backend="cpu", configure=found.configure, supports=found.supports)(found.launch)
        registered.append(subject)
        return subject

    with own_registry():
        yield register
    for subject in registered:
        subject.forward.forget_plans()


@pytest.mark.parametrize("name", SIMPLE)
def test_the_second_call_of_a_signature_is_replayed(name, launches, on_cpu):
    subject = on_cpu(name)
    workload = subject.cpu_workloads[0]
    dtype = workload.dtypes[0] if name == "moe_align" else torch.bfloat16  # which takes ids
    sample = subject.inputs(workload.params, dtype, torch.device("cpu"), 0)
    call = partial(subject.function, *sample.args, backend="cpu", **sample.kwargs)
    with torch.no_grad():
        call()
        first = dict(launches)
        assert first["ordinary"] >= 1 and first["replayed"] == 0
        call()
    assert launches == {"ordinary": first["ordinary"], "replayed": first["ordinary"]}


def test_a_replay_has_the_shape_of_the_first_call(launches, on_cpu):
    """A packed vector: input and output differ in shape and agree in dtype and stride."""
    on_cpu("silu_and_mul")
    x = torch.randn(2 * 24)
    with torch.no_grad():
        made = [tilewright.ops.silu_and_mul(x) for _ in range(2)]
    assert launches["replayed"] == 1
    assert [m.shape for m in made] == [(24,), (24,)]


def test_another_signature_is_not_replayed(launches, on_cpu):
    on_cpu("rms_norm")
    x, w = torch.randn(4, 64), torch.randn(64)
    with torch.no_grad():
        for args in ((x, w), (x[:3], w), (x.double().float().bfloat16(), w.bfloat16()), (x[:, ::2], w[::2])):
            before = launches["ordinary"]
            tilewright.ops.rms_norm(*args)
            assert launches["ordinary"] == before + 1
        assert launches["replayed"] == 0


@pytest.mark.parametrize("closed_by", ["profiler", "recording", "subclass", "transform", "transform before"])
def test_the_road_is_closed_where_another_party_must_see_the_op(closed_by, launches, on_cpu):
    on_cpu("rms_norm")
    x, w = torch.randn(4, 64), torch.randn(64)
    with torch.no_grad():
        for _ in range(2):
            tilewright.ops.rms_norm(x, w)
        assert launches["replayed"] == 1
        if closed_by == "profiler":
            with torch.profiler.profile(acc_events=True):
                tilewright.ops.rms_norm(x, w)
        elif closed_by == "recording":
            with tilewright.dispatch.record():
                tilewright.ops.rms_norm(x, w)
        elif closed_by == "subclass":
            tilewright.ops.rms_norm(x.as_subclass(Subclass), w)
        elif closed_by == "transform before":
            kept = []
            torch.func.vjp(lambda t: kept.append(t) or t, x)
            tilewright.ops.rms_norm(kept[0], w)
        else:
            torch.func.vjp(lambda t: t * tilewright.ops.rms_norm(x, w).sum(), x)
    assert launches["replayed"] == 1


def test_a_gradient_that_no_kernel_computes_is_refused_after_a_tape_too(launches, on_cpu):
    on_cpu("apply_rope")
    q, cos, sin = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    for _ in range(2):
        tilewright.ops.apply_rope(q, q.clone(), cos, sin)
    assert launches["replayed"] == 1
    with pytest.raises(tilewright.errors.InputError, match="cos or sin requires a gradient"):
        tilewright.ops.apply_rope(q, q.clone(), cos.requires_grad_(), sin)


class Subclass(torch.Tensor):
    pass


def test_a_cpu_call_asks_for_no_cuda_device(monkeypatch):
    """A CUDA build of torch without a GPU raises when it is asked for the current device."""

    def no_gpu():
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(replay, "_current_device", no_gpu)
    tilewright.ops.softmax(torch.randn(2, 3))


def test_a_cpu_call_is_planned_once(monkeypatch):
    raw = contract("softmax").forward
    raw.forget_plans()
    x = torch.randn(5, 7)
    wanted = torch.softmax(x, -1)
    out = torch.full_like(x, torch.nan)
    for _ in range(2):  # the second time nothing is planned
        torch.testing.assert_close(tilewright.ops.softmax(x), wanted)
        torch.testing.assert_close(tilewright.ops.softmax(x, out=out.fill_(torch.nan)), wanted)
        monkeypatch.setattr(raw, "plan", lambda *args: pytest.fail("planned again"))


def test_a_cpu_call_that_is_replayed_still_reads_its_data():
    """Positions are looked at where that costs no wait: a replay must not skip it."""
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 4, 8)
    table = torch.randn(4, 8)
    good, bad = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 4]])
    for _ in range(2):
        tilewright.ops.apply_rope(q, k, table, table, positions=good)
    with pytest.raises(tilewright.errors.InputError, match="positions reach from 0 to 4"):
        tilewright.ops.apply_rope(q, k, table, table, positions=bad)


def test_a_tensor_without_strides_is_refused_by_name_where_calls_are_replayed(replay_on_cpu):
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(tilewright.errors.InputError, match=r"softmax: x is sparse .* needs a dense tensor"):
        tilewright.ops.softmax(sparse)
    with pytest.raises(tilewright.errors.InputError, match="sparse"):
        tilewright.ops.rms_norm(torch.eye(4), torch.ones(4).to_sparse())


def test_a_backward_after_a_tape_gets_python_numbers(launches, on_cpu):
    """A number of another kind finds the tape of its equal, and goes on to a backward that is planned first then."""
    on_cpu("rms_norm")
    x, w = torch.randn(4, 64, requires_grad=True), torch.randn(64)
    offsets = []

    @register_impl("rms_norm", backend="cpu", direction="bwd")
    def launch(outs, dy, x, weight, eps, offset, *rest, config):
        offsets.append(offset)
        outs[0].zero_()

    for offset in (1.0, 1.0, np.float32(1.0)):
        y = tilewright.ops.rms_norm(x, w, offset=offset, backend="cpu")
        if isinstance(offset, np.floating):
            torch.autograd.grad(y.sum(), x)
    assert [type(o) for o in offsets] == [float]


def test_the_first_call_of_an_op_makes_no_other_call_older():
    """Kernels are imported when their op is first called; what was decided before, that call's own plan too, holds."""
    program = """
import torch
from tilewright import ops
from tilewright.dispatch import contract

x, w = torch.randn(8, 64), torch.ones(64)
subject = contract("softmax").forward
planned = []
plan = subject.plan
subject.plan = lambda *args: planned.append(args) or plan(*args)
ops.softmax(x)
first = len(planned)
assert first > 0
ops.softmax(x)
ops.rms_norm(x, w)
ops.swiglu(x, x)
ops.softmax(x)
assert len(planned) == first, planned
"""
    subprocess.run([sys.executable, "-c", program], check=True)
