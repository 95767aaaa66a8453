"""torch.compile: one graph, forward and training, with every option; and torch's own check of the registrations."""

import pytest
import torch
from tests.ops.gemm.bounds import check, operands
from tests.ops.gemm.stand_in import stand_in

from tilewright import ops

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    with stand_in("matmul", "bmm"):
        yield
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_training_in_one_graph(activation, backend):
    weight, bias = torch.randn(48, 32, requires_grad=True), torch.randn(48, requires_grad=True)
    x, c = torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 6, 24 if activation == "swiglu" else 48)

    def step(x, weight, bias, c):
        y = ops.matmul(x, weight, bias=bias, c=c, activation=activation, trans_b=True, alpha=0.5, backend=backend)
        return y.square().mean()

    leaves = (x, weight, bias)
    eager = torch.autograd.grad(step(*leaves, c), leaves)
    made = torch.autograd.grad(compiled(step)(*leaves, c), leaves)
    torch.testing.assert_close(made, eager)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_every_option_in_one_graph(backend):
    a, b = operands(12, 40, 32, "nn", HALF, "cpu")
    bias, c, alpha = torch.randn(40), torch.randn(12, 20), torch.tensor([0.5])

    def function(a, b):
        options = {"bias": bias, "c": c, "alpha": alpha, "activation": "swiglu", "out_dtype": torch.float32}
        return ops.matmul(a.mT, b.mT, trans_a=True, trans_b=True, backend=backend, **options)

    with torch.no_grad():
        check(compiled(function)(a, b), a, b, bias=bias, c=c, alpha=alpha, activation="swiglu")


def test_accumulation_into_a_buffer():
    a, b = operands(12, 40, 32, "nn", HALF, "cpu")
    total = torch.randn(12, 40)
    before = total.clone()

    def add(total):
        ops.matmul(a, b, c=total, out=total, out_dtype=torch.float32, backend="cpu")
        return total + 1

    made = compiled(add)(total)
    check(total, a, b, c=before)
    assert torch.equal(made, total + 1)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_result_with_leading_dimensions(backend):
    a, b = torch.randn(2, 3, 32), torch.randn(32, 40)
    made = torch.zeros(2, 3, 40)
    with torch.no_grad():
        compiled(lambda a, out: ops.matmul(a, b, out=out, backend=backend))(a, made)
    check(made.view(6, 40), a.view(6, 32), b)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_symbolic_sizes():
    _, b = operands(1, 40, 32, "nt", HALF, "cpu")
    function = torch.compile(
        lambda a: ops.matmul(a, b, activation="silu", backend="cpu"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for m in (5, 9, 70):
        a, _ = operands(m, 40, 32, "nt", HALF, "cpu")
        check(function(a), a, b, activation="silu")


@pytest.mark.parametrize("op", ["matmul", "bmm"])
def test_registrations(op):
    lead = (2,) if op == "bmm" else ()
    a, b = operands(8, 24, 16, "tt", HALF, "cpu", lead=lead)
    bias, c, scale = torch.randn(24), torch.randn(*lead, 8, 12), torch.ones(1)
    raw = getattr(torch.ops.tilewright, f"_{op}_fwd")
    for args in (
        (a, b, None, None, None, 0.5, "", torch.float32),
        (a, b, bias, c, scale, 1.0, "swiglu", HALF),
    ):
        torch.library.opcheck(raw.default, (*args, "cpu", "default"))
        out = torch.empty(*lead, 8, 12 if args[6] else 24, dtype=args[7])
        torch.library.opcheck(raw.out, (*args, "cpu", "default"), {"out0": out}, test_utils="test_faketensor")
    backward = getattr(torch.ops.tilewright, f"_{op}_bwd").default
    dz = torch.randn(*lead, 8, 24).to(HALF)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(backward, (dz, a, b, scale, 0.5, *needs, "cpu", "default"))
