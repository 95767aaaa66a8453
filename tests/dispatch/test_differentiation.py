"""Forward mode, gradients of gradients, and tensors whose memory is not their value: right for every op, or refused."""

import pytest
import torch
from tests.harness.registry import own_registry
from torch.autograd import forward_ad

from tilewright import ops
from tilewright.dispatch import contract, contracts, explain, record, register_impl, replay
from tilewright.dispatch.call import _OpFunction, _run
from tilewright.errors import InputError

CPU = torch.device("cpu")
SUBJECTS = {n: c for n, c in contracts().items() if not n.startswith("test_") and c.gradient is not None}
ROWS = {"M": 3, "N": 6}
IMAGES = {"B": 2, "G": 2, "C": 2, "S": (2, 3)}
PRODUCT = {"M": 3, "N": 4, "K": 5}
ATTENTION = {"B": 1, "H": 2, "H_kv": 1, "S": 5, "D": 8}
PACKED = {"H": 2, "H_kv": 1, "D": 8, "lengths": (3, 0, 4), "causal": True}
LATENT = {"B": 1, "H": 2, "S": 4, "D": 8, "D_pe": 4, "D_v": 6}
STATES = {"N": 3, "B": 1, "H": 2, "S": 3, "D": 4}
SCORES = {"B": 1, "H": 2, "M": 3, "N": 4}
ROUTED = {"M": 3, "N": 6, "K": 2}
MOVED = {"M": 4, "N": 6, "E": 3, "K": 2}
ENTROPY = {"M": 4, "N": 5, "ignored": 0.3}
ROTARY = {"B": 1, "S": 3, "H": 2, "H_kv": 1, "D": 8}
PROBLEMS = {
    "rms_norm": [ROWS, {**ROWS, "offset": 1.0}, {**ROWS, "fp32_weight": True}, {**ROWS, "weight_dtype": None}],
    "add_rms_norm": [ROWS, {**ROWS, "weight_dtype": None}],
    "layer_norm": [ROWS, {**ROWS, "affine": "none"}],
    "group_norm": [IMAGES, {**IMAGES, "affine": "none", "channels_last": True}],
    "rms_norm_gated": [ROWS, {**ROWS, "norm_before_gate": False, "groups": 2}],
    **{name: [ROWS] for name in ("silu_and_mul", "geglu", "softmax", "log_softmax", "sparsemax")},
    "swiglu": [ROWS, {**ROWS, "gate_multiplier": 0.5, "limit": 0.5}],
    "gelu_and_mul": [ROWS, {**ROWS, "approximate": "none"}],
    "relu2": [ROWS, {**ROWS, "gated": True}],
    "hadamard_transform": [ROWS, {**ROWS, "factor": 0.5}],
    "swigluoai_and_mul": [ROWS, {**ROWS, "interleaved": False}],
    "logsumexp": [ROWS, {**ROWS, "keepdim": True}],
    "masked_softmax": [{**SCORES, "causal": True, "temperature": 2.0}, {**SCORES, "mask": "bias"}],
    "dropout": [{**ROWS, "p": 0.5, "residual": True}],
    "apply_rope": [ROTARY, {**ROTARY, "interleaved": True, "R": 4}],
    "qk_norm_rope": [ROTARY, {**ROTARY, "interleaved": True, "R": 4, "offset": 1.0}],
    "matmul": [PRODUCT, {**PRODUCT, "bias": True, "c": True, "alpha": 0.5}, {**PRODUCT, "layout": "tt"}],
    "bmm": [{"B": 2, **PRODUCT}],
    "grouped_matmul": [{"G": 2, **PRODUCT}],
    "gated_mlp": [{"M": 3, "H": 4, "I": 5}, {"M": 3, "H": 4, "I": 5, "activation": "gelu_tanh", "recompute": True}],
    "fmha": [
        {**ATTENTION, "causal": True},
        {**ATTENTION, "sinks": True, "softcap": 1.5},
        {**ATTENTION, "alibi": True, "window": 2},
        {**ATTENTION, "S_q": 1, "S_k": 4, "return_lse": True},
    ],
    "fmha_dropout": [{**ATTENTION, "causal": True, "p": 0.3}],
    "fmha_varlen": [PACKED, {**PACKED, "sinks": True}],
    "mla": [LATENT, {**LATENT, "causal": False}],
    "topk_softmax": [ROUTED],
    "topk_sigmoid": [ROUTED, {**ROUTED, "bias": True}],
    "moe_permute": [MOVED],
    "moe_unpermute": [MOVED],
    "fused_moe": [{"M": 4, "E": 3, "K": 2, "H": 8, "I": 6}],
    "cross_entropy": [
        ENTROPY,
        {**ENTROPY, "weight": True, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "reduction": "none"},
    ],
    "linear_cross_entropy": [
        {**ENTROPY, "K": 4, **options}
        for options in ({"bias": True, "chunk_rows": 2}, {"z_loss": 0.1, "reduction": "none"})
    ],
    "kl_div": [ROWS, {**ROWS, "log_target": True, "reduction": "none"}],
    "jsd": [
        {**ENTROPY, "temperature": 2.0},
        {**ENTROPY, "beta": 0.0, "reduction": "none"},
        {**ENTROPY, "beta": 1.0, "log_probs": True},
    ],
    "linear_jsd": [
        {**ENTROPY, "K": 4, "K_t": 3, "bias": True, "chunk_rows": 2, "hard_weight": 0.3},
        {**ENTROPY, "K": 4, "beta": 1.0, "reduction": "none"},
    ],
    "fused_moe_bias": [{"M": 4, "E": 3, "K": 2, "H": 8, "I": 6, "interleaved": True}],
    "merge_states": [STATES, {**STATES, "form": "pair"}, {**STATES, "blind": 1}],
}
LINEAR = ("apply_rope", "dropout", "hadamard_transform", "kl_div", "moe_permute")  # and their gradient, in what comes
CASES = [(name, problem) for name in SUBJECTS for problem in PROBLEMS[name]]  # an op without a problem is an error
EACH_CASE = pytest.mark.parametrize(
    ("name", "problem"), CASES, ids=[f"{n}-{'-'.join(str(v) for v in p.values())}" for n, p in CASES]
)


def raw_arguments(name, problem, dtype, seed=0):
    """What the raw op gets of a call of the public function."""
    subject = SUBJECTS[name]
    sample = subject.inputs(problem, torch.float32, CPU, seed)
    with record() as recording, torch.no_grad():
        subject.function(*sample.args, **sample.kwargs)
    args = next(args for raw, args, *_ in recording.calls if raw is subject.forward)
    return tuple(widened(a) if dtype == torch.float64 else a for a in args)


def widened(value):
    """`value` of float64 where it is of float32, a tensor or the dtype of a result."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


def wanted(name, args):
    """Positions of the arguments that have a gradient."""
    subject = contract(name)
    own = [i for i in subject.gradient.inputs if isinstance(args[i], torch.Tensor)]
    others = [2, 3] if name in ("matmul", "bmm") else []  # bias and c
    return own + [i for i in others if isinstance(args[i], torch.Tensor)]


def through_the_machinery(name, args, positions):
    """`function(*tensors at positions)` by the op's own autograd function, its raw ops computed by the reference."""

    def function(*given):
        plain = list(args)
        for position, tensor in zip(positions, given, strict=True):
            plain[position] = tensor
        made = _OpFunction.apply(contract(name), None, "torch", "default", *plain)
        made = made if isinstance(made, tuple) else (made,)
        return tuple(t for t in made if t.requires_grad)

    return function, tuple(args[i].detach().clone().requires_grad_() for i in positions)


@EACH_CASE
def test_gradients_of_gradients_in_float64(name, problem):
    args = raw_arguments(name, problem, torch.float64)
    function, inputs = through_the_machinery(name, args, wanted(name, args))
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)


@EACH_CASE
def test_gradients_of_the_reference_itself_have_gradients(name, problem):
    args = raw_arguments(name, problem, torch.float64)
    positions = wanted(name, args)

    def function(*given):
        plain = list(args)
        for position, tensor in zip(positions, given, strict=True):
            plain[position] = tensor
        made = contract(name).forward.plain(*plain)
        return tuple(t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad)

    inputs = tuple(args[i].detach().clone().requires_grad_() for i in positions)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)


@EACH_CASE
def test_a_graph_of_the_gradient_changes_no_gradient(name, problem):
    """`create_graph=True` gives what the plain backward gives, and leaves it attached."""
    args = raw_arguments(name, problem, torch.float32)
    function, inputs = through_the_machinery(name, args, wanted(name, args))
    outputs = function(*inputs)
    seeds = [torch.randn_like(o) for o in outputs]
    plain = torch.autograd.grad(outputs, inputs, seeds, retain_graph=True)
    attached = torch.autograd.grad(outputs, inputs, seeds, create_graph=True)
    torch.testing.assert_close(attached, plain)
    assert not any(g.requires_grad for g in plain)
    assert any(g.requires_grad for g in attached) != (name in LINEAR)


def penalty(function, x, *others):
    """Gradient of the squared norm of a gradient."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(function(x, *others).square().sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0]


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_a_gradient_penalty_above_a_kernel(name):
    """The C++ kernels compute no gradient of a gradient; the reference does."""
    subject = contract(name)
    x = torch.randn(4, 64)
    others = (torch.rand(64) + 0.5,) if name == "rms_norm" else ()
    expected = penalty(subject.reference, x.double(), *(t.double() for t in others))
    with record() as recording:
        made = penalty(lambda *args: subject.function(*args, backend="cpu"), x, *others)
    torch.testing.assert_close(made, expected.float(), rtol=1e-4, atol=1e-4)
    assert [(p.direction, p.backend) for p in recording.plans[:2]] == [("fwd", "cpu"), ("bwd", "torch")]
    assert "differentiated" in recording.plans[1].why


@pytest.mark.parametrize("backend", [None, "cpu", "torch"])
def test_forward_mode_through_a_kernel(backend):
    x, w, dx, dw = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64), torch.randn(64)
    expected = torch.func.jvp(ops.norm.rms_norm.reference, (x, w), (dx, dw))
    function = lambda x, w: ops.rms_norm(x, w, backend=backend)  # noqa: E731
    torch.testing.assert_close(torch.func.jvp(function, (x, w), (dx, dw)), expected)
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(function(forward_ad.make_dual(x, dx), forward_ad.make_dual(w, dw)))
        torch.testing.assert_close((made.primal, made.tangent), expected)
    jacobian = torch.func.jacfwd(ops.norm.rms_norm.reference)(x[0], w)
    torch.testing.assert_close(torch.func.jacfwd(function)(x[0], w), jacobian)


@EACH_CASE
def test_forward_mode_of_every_op(name, problem, replay_on_cpu):
    """A tangent is the reference's, also for a signature that was seen before."""
    subject, args = contract(name), raw_arguments(name, problem, torch.float32)
    positions = wanted(name, args)
    tangents = [torch.randn_like(args[i]) for i in positions]
    with torch.no_grad():
        first(_run(subject, args, "auto", "default"))

    def tangent(function):
        with forward_ad.dual_level():
            dual = list(args)
            for position, t in zip(positions, tangents, strict=True):
                dual[position] = forward_ad.make_dual(args[position], t)
            return forward_ad.unpack_dual(first(function(*dual))).tangent

    made = tangent(lambda *dual: _run(subject, dual, "auto", "default"))
    plain = [args[i].double() for i in positions]

    def exact(*given):
        whole = list(args)
        for position, tensor in zip(positions, given, strict=True):
            whole[position] = tensor
        return first(subject.forward.reference(*(widened(t) for t in whole)))

    _, expected = torch.func.jvp(exact, tuple(plain), tuple(t.double() for t in tangents))
    torch.testing.assert_close(made.double(), expected, rtol=1e-3, atol=1e-3)


def first(made):
    return made[0] if isinstance(made, tuple) else made


def test_forward_mode_over_a_backward():
    """A Hessian by forward mode over reverse mode, and one by reverse mode twice."""
    x, w = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    function = lambda x: ops.rms_norm(x[None], w).sin().sum()  # noqa: E731
    plain = lambda x: ops.norm.rms_norm.reference(x[None], w).sin().sum()  # noqa: E731
    expected = torch.autograd.functional.hessian(plain, x)
    torch.testing.assert_close(torch.func.hessian(function)(x), expected)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(function))(x), expected)
    single = torch.func.jacrev(torch.func.jacrev(lambda x: ops.rms_norm(x[None], w.float()).sin().sum()))
    torch.testing.assert_close(single(x.float()), expected.float(), rtol=1e-4, atol=1e-4)


def test_a_tangent_of_the_gradient_that_comes_in_goes_through():
    x, w, dy, t = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64), torch.randn(4, 64)
    x.requires_grad_()
    y = ops.rms_norm(x, w)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, t), retain_graph=True)
        tangent = forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(tangent, torch.autograd.grad(y, x, t)[0])  # a backward is linear in what comes in


def test_nothing_is_replayed_in_forward_mode(replay_on_cpu):
    x = torch.randn(4, 64)
    raw = contract("softmax").forward
    assert replay.lookup(raw, (x,), "auto", "default") is not None
    with forward_ad.dual_level():
        assert replay.lookup(raw, (x,), "auto", "default") is None
    assert replay.lookup(raw, (x,), "auto", "default") is not None


def test_a_raw_op_refuses_a_tangent():
    x = torch.randn(4, 64)
    with forward_ad.dual_level(), pytest.raises(InputError, match="has a tangent"):
        torch.ops.tilewright._softmax_fwd(forward_ad.make_dual(x, x), "auto", "default")


def test_out_refuses_a_tangent():
    x, w = torch.randn(4, 64), torch.randn(64)
    with forward_ad.dual_level(), pytest.raises(InputError, match="no forward mode"):
        ops.rms_norm(forward_ad.make_dual(x, x), w, out=torch.empty(4, 64))


def negative(x):
    """The same numbers as `x`, in memory of the other sign."""
    made = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert made.is_neg()
    return made


@pytest.fixture
def reading_kernel():
    """softmax and rms_norm get a backend that reads the memory of x, as kernels do."""

    def memory(x):
        return torch.from_numpy(x.detach().resolve_neg().numpy()) if not x.is_neg() else torch._neg_view(x).detach()

    seen = []
    with own_registry():

        @register_impl("softmax", backend="cpu")
        def launch(outs, x, *, config):
            seen.append((x.is_neg(), x.stride()))
            torch.softmax(memory(x), -1, out=outs[0])

        yield seen
    contract("softmax").forward.forget_plans()


def test_the_negative_bit_is_read_with_its_sign(reading_kernel, replay_on_cpu):
    x = torch.randn(4, 64)
    strided = x.new_empty(4, 128)[:, ::2].copy_(x)  # as the imaginary part lies
    for _ in range(2):
        expected = ops.softmax(strided)
        torch.testing.assert_close(ops.softmax(negative(x)), expected)
        torch.testing.assert_close(ops.softmax(torch._neg_view(-x)), torch.softmax(x, -1))
    assert not any(is_neg for is_neg, _ in reading_kernel)


def test_zeros_without_memory_are_zeros(reading_kernel, replay_on_cpu):
    zeros = torch._efficientzerotensor(4, 64)
    for _ in range(2):
        torch.testing.assert_close(ops.softmax(torch.zeros(4, 64)), torch.full((4, 64), 1 / 64))
        torch.testing.assert_close(ops.softmax(zeros), torch.full((4, 64), 1 / 64))
    assert {strides for _, strides in reading_kernel} == {(64, 1)}  # torch's dispatcher makes them with strides of 0


def test_an_out_whose_memory_is_not_its_value_is_refused(reading_kernel, replay_on_cpu):
    x = torch.randn(4, 64)
    memory = torch.empty(4, 64)
    ops.softmax(x, out=memory)
    with pytest.raises(InputError, match="resolve_neg"):
        ops.softmax(x, out=torch._neg_view(memory))
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        ops.softmax(x, out=torch._efficientzerotensor(4, 64))


def test_gradients_with_the_negative_bit(replay_on_cpu):
    x, w, dy = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64)
    x.requires_grad_()
    y = ops.rms_norm(x, w)
    expected = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, torch._neg_view(-dy))[0], expected)


@pytest.fixture
def forward_only():
    """layer_norm gets a kernel without a backward."""
    with own_registry():

        @register_impl("layer_norm", backend="cpu")
        def launch(outs, x, weight, bias, eps, *, config):
            outs[0].copy_(torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps))

        yield
    contract("layer_norm").forward.forget_plans()


def test_a_recording_names_what_ran(forward_only):
    x, w, b = torch.randn(4, 64, requires_grad=True), torch.randn(64), torch.randn(64)
    with record() as recording:
        ops.layer_norm(x, w, b)
    assert [plan.backend for plan in recording.plans] == ["torch"]
    assert "no backward kernel" in recording.plans[0].why
    with record() as recording, torch.no_grad():
        ops.layer_norm(x, w, b)
    assert [plan.backend for plan in recording.plans] == ["cpu"]
    with record() as recording, forward_ad.dual_level():
        ops.layer_norm(forward_ad.make_dual(x, x.detach()), w, b)
    assert [plan.backend for plan in recording.plans] == ["torch"]


def test_an_explanation_names_what_would_run(forward_only):
    x, w, b = torch.randn(4, 64, requires_grad=True), torch.randn(64), torch.randn(64)
    told = explain("layer_norm", x, w, b)
    assert told.backend == "torch"
    assert "no backward kernel" in str(told)
    with torch.no_grad():
        assert explain("layer_norm", x, w, b).backend == "cpu"
    assert explain("layer_norm", x.detach(), w, b).backend == "cpu"


@pytest.mark.parametrize("backend", [None, "cpu", "torch"])
def test_function_transforms_above_a_kernel(backend):
    x, w, dy = torch.randn(3, 4, 64), torch.rand(64) + 0.5, torch.randn(2, 3, 4, 64)
    function = lambda x: ops.rms_norm(x, w, backend=backend)  # noqa: E731
    plain = lambda x: ops.norm.rms_norm.reference(x, w)  # noqa: E731
    for transform in (
        torch.func.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sin().sum()),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum())),
        lambda f: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sin().sum())(x).square().sum()),
        lambda f: lambda x: torch.func.vjp(f, x)[1](dy[0])[0],
        lambda f: lambda x: torch.func.jacrev(lambda x: f(x).sum(-1))(x[0]),
        lambda f: lambda x: batched(f, x, dy, create_graph=False),
        lambda f: lambda x: batched(f, x, dy, create_graph=True),
    ):
        torch.testing.assert_close(transform(function)(x), transform(plain)(x), rtol=1e-4, atol=1e-4)


def batched(function, x, seeds, create_graph):
    """Gradients for several gradients of the result at once."""
    x = x.clone().requires_grad_()
    (made,) = torch.autograd.grad(function(x), x, seeds, is_grads_batched=True, create_graph=create_graph)
    return made.detach() if not create_graph else torch.autograd.grad(made.square().sum(), x)[0]
