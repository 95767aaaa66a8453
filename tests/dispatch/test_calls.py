"""The way of one call: raw op, guard, out=, gradients, torch.compile, recording, explanation."""

from contextlib import nullcontext

import pytest
import torch
from tests.harness.registry import own_registry
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import ops
from tilewright.dispatch import contract, explain, record, register_impl
from tilewright.errors import BackendError, InputError

X, W = torch.randn(6, 16), torch.randn(16)


def test_a_raw_op_with_a_gradient_wanted_raises_instead_of_losing_it(double):
    x = X.clone().requires_grad_()
    with pytest.raises(InputError, match="raw op without a gradient"):
        torch.ops.tilewright._test_double_fwd(x, "auto", "default")
    with torch.no_grad():
        assert torch.equal(torch.ops.tilewright._test_double_fwd(x, "auto", "default"), 2 * x)


def test_out_is_written_and_returned():
    out = torch.full_like(X, torch.nan)
    assert ops.rms_norm(X, W, out=out) is out
    assert torch.equal(out, ops.rms_norm(X, W))


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (torch.empty(6, 15), r"needs contiguous \(6, 16\) torch.float32"),
        (torch.empty(6, 16, dtype=torch.float64), "needs contiguous"),
        (torch.empty(16, 6).T, "needs contiguous"),
        (X, "shares memory with an input"),
    ],
)
def test_a_wrong_out_is_refused_and_left_alone(out, match):
    before = out.clone()
    with pytest.raises(InputError, match=match):
        ops.rms_norm(X, W, out=out)
    assert torch.equal(out.nan_to_num(), before.nan_to_num())


def test_out_with_a_gradient_is_refused():
    with pytest.raises(InputError, match="no gradient"):
        ops.rms_norm(X.clone().requires_grad_(), W, out=torch.empty_like(X))


def planted(outs: tuple[torch.Tensor], x: torch.Tensor, w: torch.Tensor, *rest: object, config: object) -> None:
    torch.mul(x, w, out=outs[0])  # not a norm: shows which code ran


@pytest.fixture
def opaque_rms_norm():
    """An implementation that is visible in graphs and results; its backward returns ones."""
    with own_registry():
        register_impl("rms_norm", backend="cpu")(planted)

        @register_impl("rms_norm", backend="cpu", direction="bwd")
        def backward(outs, dy, x, w, eps, offset, fp32_weight, need_dweight, *, config):
            for out in outs:
                out.fill_(1.0)

        yield


def graph_of(function, *args):
    """Names of the aten and custom ops of the forward graph AOTAutograd hands to a compiler."""
    seen = []

    def compiler(gm, example_inputs):
        seen.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return gm

    from functorch.compile import make_boxed_compiler
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=make_boxed_compiler(compiler), bw_compiler=make_boxed_compiler(lambda gm, _: gm))
    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return result, seen


def test_compiled_call_inlines_the_reference_where_torch_is_chosen():
    result, names = graph_of(lambda x, w: ops.rms_norm(x, w, backend="torch"), X, W)
    assert not any("tilewright" in n for n in names) and any("rsqrt" in n for n in names)
    torch.testing.assert_close(result, ops.rms_norm(X, W, backend="torch"))


def test_compiled_call_keeps_an_implementation_opaque(opaque_rms_norm):
    result, names = graph_of(lambda x, w: ops.rms_norm(x, w), X, W)
    assert any("_rms_norm_fwd" in n for n in names) and not any("rsqrt" in n for n in names)
    assert torch.equal(result, X * W)


def test_the_chosen_backend_travels_to_the_backward(opaque_rms_norm):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    ops.rms_norm(x, w, backend="cpu").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(w.grad, torch.ones_like(w))
    x.grad = None
    ops.rms_norm(x, w, backend="torch").sum().backward()
    assert not torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_match_eager(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(ops.rms_norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x, w = torch.randn(rows, 16, requires_grad=True), W.clone().requires_grad_()
        dy = torch.randn(rows, 16)
        got = torch.autograd.grad(compiled(x, w), (x, w), dy)
        want = torch.autograd.grad(ops.rms_norm(x, w), (x, w), dy)
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e)


def test_recording_lists_plans_without_running_under_fake_tensors(opaque_rms_norm):
    with FakeTensorMode(), record() as recording:
        x = torch.empty(100, 16)
        ops.rms_norm(x, torch.empty(16))
        ops.rms_norm(x[:90], torch.empty(16))
        ops.rms_norm(x[:3], torch.empty(16))
    assert [(p.op, p.bucket, p.backend) for p in recording.plans] == [
        ("rms_norm", "M=128,N=16,plain=1", "cpu"),
        ("rms_norm", "M=4,N=16,plain=1", "cpu"),
    ]
    assert len(recording.calls) == 3


def test_explain_says_what_is_chosen_and_why_the_rest_is_not():
    text = str(explain("layer_norm", X, W, W))
    assert "-> torch: unmeasured here" in text and "triton: runs on cuda tensors, got cpu" in text
    data = explain("layer_norm", X, W, W).to_dict()
    assert data["backend"] == "torch" and data["bucket"] == "M=8,N=16"
    with pytest.raises(BackendError, match="runs on cuda"):
        explain("rms_norm", X, W, backend="triton")
    with pytest.raises(InputError, match="weight"):
        explain("rms_norm", X, W[:3])


@pytest.mark.parametrize("sequence", [list, tuple])
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_explain_takes_tensors_inside_sequences(sequence, fake):
    """merge_states makes four raw arguments of them, group_gemm passes a list on to its raw op."""
    with FakeTensorMode() if fake else nullcontext():
        o, lse = (sequence(torch.randn(*shape) for _ in range(2)) for shape in ((2, 4, 8), (2, 4)))
        a, b = sequence((torch.ones(4, 8), torch.ones(3, 6))), sequence((torch.ones(8, 5), torch.ones(6, 7)))
    assert explain("merge_states", o, lse).bucket == "M=8,D=8,N=2"
    assert explain("merge_states", o, lse=lse).bucket == "M=8,D=8,N=2"
    assert explain("group_gemm", a, list_b=b).bucket.startswith("M=4,N=7,K=8,G=2,")


def test_unknown_op_names_the_known_ones():
    with pytest.raises(InputError, match="no op named 'rmsnorm'. Ops: .*rms_norm"):
        contract("rmsnorm")


def test_autocast_does_not_change_an_op():
    x = torch.randn(4, 16)
    for backend in (None, "torch"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = ops.softmax(x, backend=backend), ops.rms_norm(x, W, backend=backend)
        outside = ops.softmax(x, backend=backend), ops.rms_norm(x, W, backend=backend)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(inside, outside, strict=True))
