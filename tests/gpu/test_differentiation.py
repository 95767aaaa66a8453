"""Above GPU kernels: gradients of gradients, forward mode, and tensors whose memory is not their value."""

import pytest
import torch
from tests.dispatch.test_differentiation import PROBLEMS, negative, wanted
from torch.autograd import forward_ad

from tilewright import ops
from tilewright.dispatch import contract, record

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HALF = torch.bfloat16
KERNELS = ("cuda", "triton", "cutile")
ROWS = {"M": 64, "N": 256}
IMAGES = {"B": 2, "G": 4, "C": 8, "S": (8, 8)}
PRODUCT = {"M": 64, "N": 128, "K": 64}
MOVED = {"M": 64, "N": 128, "E": 8, "K": 2}
EXPERTS = {"M": 64, "E": 4, "K": 2, "H": 64, "I": 64}
ENTROPY = {"M": 64, "N": 256, "ignored": 0.3}
LARGER = {
    "rms_norm": ROWS,
    "add_rms_norm": ROWS,
    "layer_norm": ROWS,
    "group_norm": IMAGES,
    "rms_norm_gated": ROWS,
    "silu_and_mul": ROWS,
    "swiglu": ROWS,
    "gelu_and_mul": ROWS,
    "geglu": ROWS,
    "relu2": ROWS,
    "swigluoai_and_mul": ROWS,
    "softmax": ROWS,
    "log_softmax": ROWS,
    "logsumexp": ROWS,
    "masked_softmax": {"B": 1, "H": 2, "M": 64, "N": 128, "causal": True},
    "sparsemax": ROWS,
    "dropout": {**ROWS, "p": 0.5, "residual": True},
    "apply_rope": {"B": 1, "S": 64, "H": 4, "H_kv": 2, "D": 64},
    "qk_norm_rope": {"B": 1, "S": 64, "H": 4, "H_kv": 2, "D": 64},
    "hadamard_transform": ROWS,
    "matmul": PRODUCT,
    "bmm": {"B": 2, **PRODUCT},
    "grouped_matmul": {"G": 2, **PRODUCT},
    "gated_mlp": {"M": 64, "H": 64, "I": 128},
    "fmha": {"B": 1, "H": 4, "H_kv": 2, "S": 128, "D": 64, "causal": True},
    "fmha_dropout": {"B": 1, "H": 4, "H_kv": 2, "S": 128, "D": 64, "causal": True, "p": 0.3},
    "fmha_varlen": {"H": 4, "H_kv": 2, "D": 64, "lengths": (37, 64, 27), "causal": True},
    "mla": {"B": 1, "H": 4, "S": 128, "D": 128, "D_pe": 64, "D_v": 128},
    "topk_softmax": {"M": 64, "N": 16, "K": 4},
    "topk_sigmoid": {"M": 64, "N": 16, "K": 4},
    "moe_permute": MOVED,
    "moe_unpermute": MOVED,
    "fused_moe": EXPERTS,
    "fused_moe_bias": EXPERTS,
    "cross_entropy": ENTROPY,
    "linear_cross_entropy": {**ENTROPY, "K": 64},
    "kl_div": ROWS,
    "jsd": ENTROPY,
    "linear_jsd": {**ENTROPY, "K": 64, "reduction": "none"},  # a mean of random tangents is nearly 0
    "merge_states": {"N": 2, "B": 1, "H": 4, "S": 64, "D": 64},
}


def test_every_differentiable_op_is_here():
    assert set(LARGER) == set(PROBLEMS)


def raw_problem(name):
    """(positions with a gradient, raw arguments, the function of those alone by a backend)."""
    subject = contract(name)
    sample = subject.inputs(LARGER[name], HALF, CUDA, 0)
    with record() as recording, torch.no_grad():
        subject.function(*sample.args, **sample.kwargs)
    args = next(args for raw, args, *_ in recording.calls if raw is subject.forward)
    return wanted(name, args), args


def by(name, backend, args, positions):
    from tilewright.dispatch.call import call

    def function(*given):
        whole = list(args)
        for position, tensor in zip(positions, given, strict=True):
            whole[position] = tensor
        made = call(contract(name), tuple(whole), backend)
        return made if isinstance(made, tuple) else (made,)

    return function


def exactly(name, args, positions):
    def function(*given):
        whole = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        whole = [torch.float64 if a is HALF or a is torch.float32 else a for a in whole]
        for position, tensor in zip(positions, given, strict=True):
            whole[position] = tensor
        made = contract(name).forward.reference(*whole)
        return made if isinstance(made, tuple) else (made,)

    return function


def backends_of(name, args):
    """Kernels that take this call; their refusals are planning's, which other tests look at."""
    from tilewright.dispatch import implementations
    from tilewright.dispatch.options import runnable

    raw = contract(name).forward
    found = implementations(raw.op, raw.direction)
    able = runnable(raw, found, args, "default")
    return [b for b in KERNELS if b in able]


def penalty(function, inputs, seed):
    """Gradients of the squared norm of a gradient."""
    inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
    made = function(*inputs)[0]
    grads = torch.autograd.grad(made, inputs, seed.to(made.dtype), create_graph=True, materialize_grads=True)
    total = sum(g.double().square().sum() for g in grads)
    return torch.autograd.grad(total + 0 * sum(t.double().sum() for t in inputs), inputs)


def error(made, expected):
    return float((made.double() - expected).norm() / expected.norm().clamp_min(1e-6))


@pytest.mark.parametrize("name", LARGER)
def test_a_gradient_penalty(name):
    """Above every kernel it has no more error than above the reference in the same dtype, by a factor of three."""
    positions, args = raw_problem(name)
    inputs = [args[i] for i in positions]
    with torch.no_grad():
        shape = by(name, "torch", args, positions)(*inputs)[0].shape
    seed = torch.randn(shape, device=CUDA, dtype=HALF)
    expected = penalty(exactly(name, args, positions), [t.double() for t in inputs], seed)
    theirs = penalty(by(name, "torch", args, positions), inputs, seed)
    for backend in backends_of(name, args):
        for _ in range(2):  # the second is a replay
            ours = penalty(by(name, backend, args, positions), inputs, seed)
            for mine, torchs, right in zip(ours, theirs, expected, strict=True):
                assert error(mine, right) <= 3 * error(torchs, right) + 1e-2, backend


@pytest.mark.parametrize("name", LARGER)
def test_forward_mode(name):
    positions, args = raw_problem(name)
    inputs = [args[i] for i in positions]
    tangents = [torch.randn_like(t) for t in inputs]
    exact = exactly(name, args, positions)
    _, expected = torch.func.jvp(exact, tuple(t.double() for t in inputs), tuple(t.double() for t in tangents))
    for backend in (None, "torch", *backends_of(name, args)):
        function = by(name, backend, args, positions)
        with torch.no_grad():
            function(*inputs)
            function(*inputs)
        with forward_ad.dual_level():
            made = function(*(forward_ad.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)))
            tangent = forward_ad.unpack_dual(made[0]).tangent
        assert tangent is not None, backend
        assert error(tangent, expected[0]) < 2e-2, backend


@pytest.mark.parametrize("name", LARGER)
def test_the_negative_bit(name):
    positions, args = raw_problem(name)
    inputs = [args[i] for i in positions]
    for backend in backends_of(name, args):
        function = by(name, backend, args, positions)
        with torch.no_grad():
            for _ in range(2):
                expected = function(*inputs)
                made = function(*(torch._neg_view(-t) for t in inputs))
                for mine, right in zip(made, expected, strict=True):
                    torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


def test_the_imaginary_part_of_a_conjugate():
    x, w = torch.randn(8, 256, device=CUDA), torch.rand(256, device=CUDA)
    for _ in range(3):
        made = ops.rms_norm(negative(x), w, backend="triton")
        torch.testing.assert_close(made, ops.rms_norm(x, w, backend="torch"), rtol=1e-5, atol=1e-5)


def test_a_gradient_with_the_negative_bit():
    x = torch.randn(8, 256, device=CUDA, requires_grad=True)
    w, dy = torch.rand(256, device=CUDA), torch.randn(8, 256, device=CUDA)
    for _ in range(3):
        y = ops.rms_norm(x, w, backend="triton")
        (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(y, x, torch._neg_view(-dy))[0], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_few_rows(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    a = torch.randn(4, 512, device=CUDA, dtype=HALF, requires_grad=True)
    b = torch.randn(512, 512, device=CUDA, dtype=HALF, requires_grad=True)
    bias = torch.randn(512, device=CUDA, dtype=HALF, requires_grad=True)
    function = lambda a, b, bias: ops.matmul(a, b, bias=bias)  # noqa: E731
    expected = torch.autograd.grad(function(a, b, bias).sum(), (a, b, bias))
    y = checkpoint(function, a, b, bias, use_reentrant=use_reentrant)
    torch.testing.assert_close([t.clone() for t in backward(y, (a, b, bias))], list(expected))


def backward(y, inputs):
    y.sum().backward()
    return [t.grad for t in inputs]
