"""What lies between matmul and a kernel: taped calls with out=, gradients on one tape, detours for awkward outputs."""

import pytest
import torch
from tests.harness.registry import own_registry
from tests.ops.gemm.bounds import VIEWS
from tests.ops.gemm.stand_in import stand_in

from tilewright import ops
from tilewright.dispatch import contract, explain, register_impl, replay
from tilewright.errors import InputError
from tilewright.jit import tape
from tilewright.jit.tape import Step, taping

HALF = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """Backend "cpu" that computes nothing and can be taped: what was launched, ordinarily and by replay."""
    made = {"ordinary": [], "replayed": []}

    def launch(outs, a, b, bias, c, *rest, config):
        made["ordinary"].append((a.shape, b.shape))
        if taping() is not None:
            record = lambda *args: made["replayed"].append(args[5:])  # noqa: E731 - after grid, stream and function
            taping().add(Step(record, (1, 1, 1), None, (), (outs[0], a, b, *(t for t in (bias, c) if t is not None))))

    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "HOST", None)
    monkeypatch.setattr(tape, "_current_stream", lambda device: 0)
    subject = contract("matmul")
    with own_registry():
        register_impl("matmul", backend="cpu")(launch)
        yield made
    for raw in (subject.forward, subject.gradient.op):
        raw.forget_plans()


def tensors():
    return torch.randn(8, 16).to(HALF), torch.randn(16, 24).to(HALF), torch.zeros(8, 24)


def test_a_call_with_out_is_replayed_on_its_pointers(launches):
    kept = []
    for _ in range(3):
        a, b, out = tensors()
        kept.append((out.data_ptr(), a.data_ptr(), b.data_ptr()))
        assert ops.matmul(a, b, out=out, out_dtype=torch.float32) is out
        assert out._version == 1
    assert len(launches["ordinary"]) == 1
    assert launches["replayed"] == kept[1:]


def test_c_that_is_out_is_replayed_and_c_that_is_not_is_another_signature(launches):
    for same in (True, True, False, False, True):
        a, b, out = tensors()
        c = out if same else torch.zeros(8, 24)
        ops.matmul(a, b, c=c, out=out, out_dtype=torch.float32)
    assert len(launches["ordinary"]) == 2
    assert len(launches["replayed"]) == 3
    assert launches["replayed"][0][3] == launches["replayed"][0][0]
    assert launches["replayed"][1][3] != launches["replayed"][1][0]


def test_an_out_across_an_input_is_refused_after_a_tape_too(launches):
    a, b, out = tensors()
    ops.matmul(a, b, c=torch.zeros(8, 24), out=out, out_dtype=torch.float32)
    memory = torch.zeros(2 * 8 * 24)
    c, out = memory[: 8 * 24].view(8, 24), memory[96 : 96 + 8 * 24].view(8, 24)
    with pytest.raises(InputError, match="shares memory with an input"):
        ops.matmul(a, b, c=c, out=out, out_dtype=torch.float32)
    assert len(launches["ordinary"]) == 1
    assert not launches["replayed"]


def test_an_alpha_that_begins_where_out_does_is_another_signature(launches):
    a, b, out = tensors()
    ops.matmul(a, b, c=out, alpha=torch.ones(1), out=out, out_dtype=torch.float32)
    with pytest.raises(InputError, match="shares memory with an input"):
        ops.matmul(a, b, c=out, alpha=out.view(-1)[:1], out=out, out_dtype=torch.float32)
    assert len(launches["ordinary"]) == 1
    assert not launches["replayed"]


def test_both_products_of_a_gradient_are_one_tape(launches):
    """Launched once the ordinary way, then replayed: no checks and no selection in a training step's backward."""
    for _ in range(3):
        a, b = (t.requires_grad_() for t in tensors()[:2])
        out = ops.matmul(a, b)
        torch.autograd.grad(out, (a, b), torch.ones_like(out))
    assert launches["ordinary"] == [((8, 16), (16, 24)), ((8, 24), (24, 16)), ((16, 8), (8, 24))]
    assert len(launches["replayed"]) == 6


@pytest.mark.parametrize("name", ["matmul", "bmm"])
def test_an_out_that_kernels_cannot_write_gets_a_copy(name):
    """Aligned operands promise an aligned result; `out` may begin or step between the copy engine's 16 bytes."""
    lead = (2,) if name == "bmm" else ()
    a, b = torch.randn(*lead, 8, 16).to(HALF), torch.randn(*lead, 16, 24).to(HALF)
    written = []

    def launch(outs, a, b, *rest, config):
        written.append(outs[0].data_ptr())
        assert outs[0].data_ptr() % 16 == 0
        assert all(s * outs[0].element_size() % 16 == 0 for s in outs[0].stride()[:-1])
        outs[0].copy_(a.float() @ b.float())

    with own_registry():
        register_impl(name, backend="cpu")(launch)
        wanted = getattr(ops, name)(a, b, backend="cpu")
        for view in (None, "misaligned", "padded_rows"):
            out = torch.full((*lead, 8, 24), torch.nan).to(HALF)
            out = out if view is None else VIEWS[view](out)
            made = getattr(ops, name)(a, b, out=out, backend="cpu")
            assert made is out and torch.equal(out, wanted)
            assert (written[-1] == out.data_ptr()) == (view is None)
    contract(name).forward.forget_plans()


def test_explain_shows_the_config_of_the_choice():
    with stand_in("matmul"):
        said = explain("matmul", torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16))
    assert (said.backend, said.config) == ("cpu", "config")
