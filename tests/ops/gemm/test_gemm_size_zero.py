"""Products in which a dimension has size 0: result, gradients, `out=`, accumulation and compilation as torch has them.

A sum over nothing is zero, so K = 0 leaves act(bias) + c.  A gradient is wanted iff a `grad_fn` is there, and it has
the shape and dtype of its argument, with zeros where nothing was multiplied.
"""

from itertools import product

import pytest
import torch
from tests.ops.gemm.bounds import PLACES, Place, run
from tests.ops.gemm.stand_in import stand_in

from tilewright import ops
from tilewright.dispatch import implementations
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.operands import activate, columns_out
from tilewright.ops.gemm.scaled.args import ScaledMatmulFp8Args, plain_scaled_args

HALF = torch.bfloat16
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
on_every_place = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])
SIZES = [size for size in product((0, 3), (0, 16), (0, 8)) if 0 in size]
BATCHES = [(0, 3, 16, 8), *((2, *size) for size in SIZES)]
ACTIVATIONS = (None, "relu", "gelu", "silu", "swiglu")


@pytest.fixture
def kernels():
    """Backend "cpu", whose gradients are composed of our products."""
    with stand_in("matmul", "bmm") as launched:
        yield launched


def draw(*shape, device="cpu", dtype=torch.float32, learns=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(learns)


def judge(made, leaves, wanted, *, rtol=1e-5):
    """`made` and its gradients against `wanted`, a function of the same leaves in float64."""
    assert made.grad_fn is not None
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = wanted(*wide)
    dy = torch.randn(made.shape, device=made.device).to(made.dtype)
    found = torch.autograd.grad(made, leaves, dy)
    right = torch.autograd.grad(exact, wide, dy.double(), allow_unused=True)
    for value, other in ((made, exact), *zip(found, right, strict=True)):
        other = torch.zeros_like(value, dtype=torch.float64) if other is None else other
        torch.testing.assert_close(value.detach().double(), other.detach(), rtol=rtol, atol=rtol)
    assert [(g.shape, g.dtype) for g in found] == [(t.shape, t.dtype) for t in leaves]


def epilogue(z, bias, c, activation):
    return activate(z + bias, activation or "") + c


@on_every_place
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_matmul_and_bmm(size, activation, place):
    batch, m, n, k = size
    n_out = columns_out(n, activation or "")
    for function, lead in ((ops.matmul, ()), (ops.matmul, (batch,)), (ops.bmm, (batch,))):
        shapes = ((*lead, m, k), (*(lead if function is ops.bmm else ()), k, n), (n,), (*lead, m, n_out))
        leaves = [draw(*shape, device=place.device) for shape in shapes]
        a, b, bias, c = leaves
        made = run(function, a, b, bias=bias, c=c, activation=activation, place=place)
        judge(made, leaves, lambda a, b, bias, c: epilogue(a @ b, bias, c, activation))
        with torch.no_grad():
            plain = run(function, a, b, bias=bias, c=c, activation=activation, place=place)
            assert plain.grad_fn is None
            torch.testing.assert_close(plain, made)
            out = c.detach().clone()  # read and written
            assert run(function, a, b, bias=bias, c=out, out=out, activation=activation, place=place) is out
            torch.testing.assert_close(out, made)


@on_every_place
@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_sums_in_float32(size, place):
    """A weight's gradient of no tokens is what was there before."""
    batch, m, n, k = size
    for function, lead in ((ops.matmul, ()), (ops.bmm, (batch,))):
        shapes = ((*lead, m, k), (*lead, k, n), (n,))
        a, b, bias = (draw(*shape, device=place.device, dtype=HALF, learns=False) for shape in shapes)
        c = draw(*lead, m, n, device=place.device, learns=False)
        for _ in range(3):  # the second call and the third go another way
            sums = c.clone()
            run(function, a, b, bias=bias, c=sums, out=sums, out_dtype=torch.float32, place=place)
            wanted = epilogue(a.double() @ b.double(), bias.double(), c.double(), None)
            torch.testing.assert_close(sums.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_composed_gradients(size, kernels):
    batch, m, n, k = size
    for function, lead in ((ops.matmul, ()), (ops.bmm, (batch,))):
        leaves = [draw(*lead, m, k), draw(*lead, k, n), draw(n), draw(*lead, m, n)]
        made = function(*leaves[:2], bias=leaves[2], c=leaves[3], backend="cpu")
        judge(made, leaves, lambda a, b, bias, c: epilogue(a @ b, bias, c, None))


@on_every_place
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n"), [(0, 16), (3, 0), (0, 0)])
def test_splitk_reduce(m, n, activation, place):
    """Its gradient is the reference's own, on every backend but where one is named."""
    leaves = [draw(2, m, n, device=place.device), draw(n, device=place.device)]
    leaves.append(draw(m, columns_out(n, activation or ""), device=place.device))
    made = ops.splitk_reduce(leaves[0], bias=leaves[1], c=leaves[2], activation=activation)
    judge(made, leaves, lambda p, bias, c: epilogue(p[0] + p[1], bias, c, activation))
    with torch.no_grad():
        plain = run(ops.splitk_reduce, leaves[0], bias=leaves[1], c=leaves[2], activation=activation, place=place)
    torch.testing.assert_close(plain, made)


@pytest.mark.parametrize("size", [(0, 16, 8), (3, 0, 8), (3, 16, 0)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(size, dynamic):
    m, n, k = size

    def step(a, b, bias, c):
        return ops.matmul(a, b, bias=bias, c=c, activation="silu")

    leaves = [draw(m, k), draw(k, n), draw(n), draw(m, n)]
    made = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*leaves)
    judge(made, leaves, lambda a, b, bias, c: epilogue(a @ b, bias, c, "silu"))


@pytest.mark.parametrize("m", [8, 4096])
def test_hoppers_kernels_refuse_a_sum_over_nothing(m, hopper):
    """Columns of wider tensors are aligned; choosing a tile for K = 0 raised IndexError, or divided by zero."""

    def why_not(op, args):
        return str(implementations(op, "fwd")["cuda"].supports(*args))

    a, b = torch.empty(1, m, 64, dtype=HALF)[..., :0], torch.empty(1, 256, 64, dtype=HALF)[..., :0].mT
    assert "K = 0" in why_not("bmm", plain_args(a, b, HALF))
    assert "K = 0" in why_not("matmul", plain_args(a[0], b[0], HALF))
    q, w = a[0].to(torch.float8_e4m3fn), b[0].to(torch.float8_e4m3fn)
    scales = torch.empty(m, 0), torch.empty(2, 0)
    assert "K = 0" in why_not("scaled_matmul", plain_scaled_args(q, w, *scales, HALF))
    assert "K = 0" in why_not("scaled_matmul_fp8", ScaledMatmulFp8Args(q, w, *scales, None, 1.0, ""))
