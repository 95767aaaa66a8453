"""Replays of calls that leave no tape: torch's, or made of parts some of which are torch's.  Seen once, they are
neither checked nor planned again, and notice all that a tape notices.
"""

import gc
import weakref
from math import copysign

import pytest
import torch
from tests.dispatch.test_selection import use_table, write
from tests.harness.registry import own_registry

from tilewright import ops, settings
from tilewright.dispatch import contract, numerics, record, register_impl, replay, set_backend, use_backend
from tilewright.errors import InputError, KernelMissingError
from tilewright.hardware.sm_budget import set_sm_budget
from tilewright.jit.tape import Step, taping

HALF = torch.bfloat16  # for float32 `auto` takes torch, kernel or not
A, B = torch.randn(8, 16).to(HALF), torch.randn(16, 24).to(HALF)
Q = torch.randn(1, 2, 4, 8).to(HALF)
RAWS = [raw for name in ("matmul", "fmha") for raw in (contract(name).forward, contract(name).gradient.op)]


@pytest.fixture(autouse=True)
def forgetful(replay_on_cpu):
    yield
    for raw in RAWS:
        raw.forget_plans()


@pytest.fixture
def work(monkeypatch):
    """What matmul and fmha did to decide: buckets, without which there is no plan, and checks of arguments."""
    done = []

    def counted(where, name):
        function = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args: done.append(name) or function(*args))

    for raw in RAWS:
        counted(raw, "bucket")
    counted(ops.gemm.dense.checks, "check_raw")
    counted(ops.attention.checks, "check_raw")
    return done


@pytest.fixture
def kernel():
    """`register(**options)` gives matmul a backend "cpu" that computes nothing and can be taped; its attributes `ran`
    and `replayed` list the shapes of a.
    """

    def register(**options):
        @register_impl("matmul", backend="cpu", **options)
        def launch(outs, a, b, *rest, config):
            shape = a.shape
            register.ran.append(shape)
            if taping() is not None:

                def replay(*launched):  # grid, stream and function, then the pointers
                    register.replayed.append(shape)
                    register.pointers = launched[-2:]

                taping().add(Step(replay, (1, 1, 1), None, (), (outs[0], a, b)))

    register.ran, register.replayed = [], []
    with own_registry():
        yield register


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def step(function, *tensors):
    """Of a training step: the result and the gradients."""
    inputs = leaves(*tensors)
    made = function(*inputs)
    return made.detach(), torch.autograd.grad(made, inputs, torch.ones_like(made))


WAYS = {
    "forward": lambda: ops.matmul(A, B),
    "strict": lambda: ops.matmul(A, B, backend="torch"),
    "out": lambda: ops.matmul(A, B, out=torch.empty(8, 24, dtype=HALF)),
    "training": lambda: step(ops.matmul, A, B),
    "no_grad": lambda: torch.no_grad()(ops.matmul)(*leaves(A, B)),
    "inference": lambda: torch.inference_mode()(ops.matmul)(A, B),
    "attention": lambda: ops.fmha(Q, Q, Q, causal=True),
    "training of attention": lambda: step(ops.fmha, Q, Q, Q),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_seen_signature_is_neither_checked_nor_planned(way, work):
    first = WAYS[way]()
    assert {"bucket", "check_raw"} <= set(work)
    work.clear()
    for _ in range(2):
        torch.testing.assert_close(WAYS[way](), first, rtol=0, atol=0)
    assert not work


def test_a_backward_of_torchs_under_a_forward_of_ours(work):
    expected = step(ops.fmha, Q, Q + 1, Q - 1)
    with own_registry():

        @register_impl("fmha", backend="cpu")
        def launch(outs, *args, config):
            for out, value in zip(outs, contract("fmha").forward.reference(*args), strict=True):
                out.copy_(value)

        for seen in range(3):
            work.clear()
            made = step(lambda *qkv: ops.fmha(*qkv, backend="cpu"), Q, Q + 1, Q - 1)
            torch.testing.assert_close(made, expected)
            assert bool(work) == (seen == 0)


def test_parts_of_a_gradient_go_their_own_ways(work, kernel):
    """dA by a kernel and dB by torch have no tape in common: the one has its own, the other its plan."""
    kernel(supports=lambda a, *rest: "is dB" if a.shape == (16, 8) else None)
    for _ in range(2):
        step(ops.matmul, A, B)
    assert kernel.ran == [A.shape, (8, 24), (8, 24)], "a part is replayed once its whole has left no tape"
    work.clear()
    kernel.replayed.clear()
    db = step(ops.matmul, A, B)[1][1]
    assert not work
    assert len(kernel.ran) == 3
    assert len(kernel.replayed) == 2
    torch.testing.assert_close(db, A.mT @ torch.ones(8, 24).to(HALF))


def test_a_registration_is_noticed(kernel):
    for _ in range(2):
        ops.matmul(A, B)
    kernel()
    ops.matmul(A, B)
    assert len(kernel.ran) == 1


def test_a_table_is_noticed(kernel, monkeypatch, tmp_path):
    kernel(config_type=None)
    raw = contract("matmul").forward
    bucket = raw.bucket_of((A, B, None, None, None, 1.0, "", HALF), "default")
    row = {"op": "matmul", "dtype": "bfloat16", "bucket": raw.bucket_text(bucket)}
    for backend, launches in (("torch", 0), ("cpu", 2), ("torch", 2)):
        use_table(monkeypatch, write(tmp_path / "t.json", backend=backend, **row))
        for _ in range(2):
            ops.matmul(A, B)
        assert len(kernel.ran) + len(kernel.replayed) == launches


def test_wishes_and_numerics_are_noticed(kernel, monkeypatch):
    kernel(deterministic=False)
    for _ in range(2):
        ops.matmul(A, B, backend="torch")
        with use_backend("torch"):
            ops.matmul(A, B)
        with numerics("deterministic"):
            ops.matmul(A, B)
    assert not kernel.ran
    ops.matmul(A, B)
    assert len(kernel.ran) == 1
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "torch")
    settings.reload()
    ops.matmul(A, B)
    assert (len(kernel.ran), len(kernel.replayed)) == (1, 0)
    set_backend("cpu")
    ops.matmul(A, B)
    assert len(kernel.ran) == 2


def test_a_wish_for_a_gradient_is_noticed():
    a, b = leaves(A, B)
    for _ in range(2):
        assert not torch.no_grad()(ops.matmul)(a, b).requires_grad
        assert not ops.matmul(A, B).requires_grad
        assert ops.matmul(a, b).requires_grad


def test_autocast_is_none_of_its_business():
    a, b = A.float(), B.float()
    expected = a @ b
    for autocast in (False, True, True):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            assert torch.equal(ops.matmul(a, b), expected)


def test_an_out_across_an_input_is_refused_when_seen_too():
    memory = torch.zeros(2 * 8 * 24).to(HALF)
    c, out = memory[: 8 * 24].view(8, 24), memory[96 : 96 + 8 * 24].view(8, 24)
    for _ in range(2):
        ops.matmul(A, B, c=torch.zeros(8, 24).to(HALF), out=torch.empty(8, 24, dtype=HALF))
    with pytest.raises(InputError, match="shares memory with an input"):
        ops.matmul(A, B, c=c, out=out)
    assert not memory.any()


def test_a_recording_hears_of_a_seen_call():
    for _ in range(2):
        ops.matmul(A, B)
    with record() as recording:
        ops.matmul(A, B)
    assert [plan.backend for plan in recording.plans] == ["torch"]


def test_nothing_of_a_call_stays_alive(kernel):
    kernel(supports=lambda a, *rest: "is dB" if a.shape == (16, 8) else None)
    kept = []
    for backend in ("torch", None):
        for _ in range(3):
            a, b, out = A.clone(), B.clone(), torch.empty(8, 24, dtype=HALF)
            inputs = leaves(a, b)
            made = ops.matmul(*inputs, backend=backend)
            made.sum().backward()
            ops.matmul(a, b, out=out, backend=backend)
            kept += [weakref.ref(t) for t in (a, b, out, made, *inputs, *(t.grad for t in inputs))]
            del a, b, out, inputs, made
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_a_missing_kernel_is_asked_for_once():
    tries = []
    with own_registry():

        @register_impl("matmul", backend="cpu")
        def launch(outs, *args, config):
            tries.append(args)
            raise KernelMissingError("no kernel in the cache, and no compiler")

        for _ in range(3):
            torch.testing.assert_close(ops.matmul(A, B), A @ B)
        assert len(tries) == 1
        for _ in range(3):
            torch.testing.assert_close(ops.matmul(A, B, out=torch.empty(8, 24, dtype=HALF)), A @ B)
        assert len(tries) == 1


@pytest.mark.parametrize("reference", [lambda x: x, lambda x: x.mT.contiguous().mT], ids=["its input", "other strides"])
def test_results_of_a_raw_op_are_its_own_every_time(double, monkeypatch, reference):
    monkeypatch.setattr(double, "reference", reference)
    for seen in range(3):
        found = replay.lookup(double, (A,), "torch", "default")
        made = (replay.replay if seen else lambda *args: replay.record(*args, "torch", "default"))(double, found, (A,))
        assert torch.equal(made, A)
        assert made.data_ptr() != A.data_ptr()
        assert made.is_contiguous()


def test_calls_with_one_tensor_twice_are_replayed_among_themselves(kernel):
    """A tape of matmul(x, x) does not say whose a pointer was, so it serves no matmul(x, y), whose tape serves both."""
    kernel()
    x, y, z = (torch.randn(16, 16).to(HALF) for _ in range(3))
    ops.matmul(x, x, backend="cpu")
    ops.matmul(y, y, backend="cpu")
    assert (len(kernel.ran), len(kernel.replayed)) == (1, 1)
    assert kernel.pointers == (y.data_ptr(), y.data_ptr())
    ops.matmul(x, y, backend="cpu")
    assert (len(kernel.ran), len(kernel.replayed)) == (2, 1)
    ops.matmul(y, z, backend="cpu")
    assert kernel.pointers == (y.data_ptr(), z.data_ptr())
    ops.matmul(z, z, backend="cpu")
    assert kernel.pointers == (z.data_ptr(), z.data_ptr())
    assert (len(kernel.ran), len(kernel.replayed)) == (2, 3)


def test_other_settings_and_another_budget_of_multiprocessors_are_noticed(kernel):
    """A tape holds the grid of its first launch, and a plan what the environment said then."""
    kernel()
    for change in (settings.reload, lambda: set_sm_budget(7), lambda: set_sm_budget(None)):
        ops.matmul(A, B)
        ops.matmul(A, B)
        ran, replayed = len(kernel.ran), len(kernel.replayed)
        assert replayed > 0
        change()
        ops.matmul(A, B)
        assert (len(kernel.ran), len(kernel.replayed)) == (ran + 1, replayed)


def test_a_budget_of_no_multiprocessors_is_refused():
    with pytest.raises(InputError, match=r"set_sm_budget\(0\): allowed are counts from 1"):
        set_sm_budget(0)


def test_zeros_of_both_signs_have_tapes_of_their_own():
    """alpha=0.0 and alpha=-0.0 are equal keys, and two constants of a tape."""
    launched = []

    with own_registry():

        @register_impl("matmul", backend="cpu")
        def launch(outs, a, b, bias, c, scale, alpha, *rest, config):
            launched.append(copysign(1.0, alpha))
            if taping() is not None:
                taping().add(
                    Step(lambda *_: launched.append(copysign(1.0, alpha)), (1, 1, 1), None, (), (outs[0], a, b))
                )

        for alpha in (0.0, -0.0, -0.0, 0.0, 0.0, 0, -0.0):
            ops.matmul(A, B, alpha=alpha)
    assert launched == [1, -1, -1, 1, 1, 1, -1]
