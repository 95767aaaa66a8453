"""Gradients of matmul and bmm: right in float64, made of products that each choose their backend, and no more of them
than are wanted.
"""

import gc
import weakref

import pytest
import torch
from tests.ops.gemm.bounds import KERNELS, check, operands, run
from tests.ops.gemm.stand_in import stand_in

from tilewright import ops
from tilewright.dispatch import record
from tilewright.errors import InputError
from tilewright.ops.gemm.operands import LAYOUTS

HALF = torch.bfloat16
BACKENDS = ("torch", "cpu")


@pytest.fixture
def kernels():
    """Backend "cpu", whose gradients are composed of our products; the list of its launches."""
    with stand_in("matmul", "bmm") as launched:
        yield launched


def double(*shape, turned=False):
    made = torch.randn(*shape, dtype=torch.float64)
    return (made.mT.contiguous().mT if turned else made).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["matmul", "bmm"])
def test_against_differences(op, layout, activation, backend, kernels):
    lead = (2,) if op == "bmm" else ()
    a, b = double(*lead, 3, 5, turned=layout[0] == "t"), double(*lead, 5, 4, turned=layout in ("nt", "tt"))
    bias, c = double(4), double(*lead, 3, 2 if activation == "swiglu" else 4)

    def function(a, b, bias, c):
        return getattr(ops, op)(a, b, bias=bias, c=c, activation=activation, alpha=0.7, backend=backend)

    assert torch.autograd.gradcheck(function, (a, b, bias, c))


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposes_leading_dimensions_and_alpha_on_the_device(backend, kernels):
    a, b = double(2, 5, 3), double(4, 5)
    alpha = torch.tensor([0.5])

    def function(a, b):
        return ops.matmul(a, b, trans_a=True, trans_b=True, alpha=alpha, backend=backend)

    assert torch.autograd.gradcheck(function, (a, b))


@pytest.mark.parametrize("wanted", ["a", "b", "bias", "c", "ab", "abias", "bc"])
def test_only_what_is_wanted_is_computed(wanted, kernels):
    names = {"a": torch.randn(6, 5), "b": torch.randn(5, 4), "bias": torch.randn(4), "c": torch.randn(6, 4)}
    asked = {"ab": ["a", "b"], "abias": ["a", "bias"], "bc": ["b", "c"]}.get(wanted, [wanted])
    for name in asked:
        names[name].requires_grad_()
    out = ops.matmul(names["a"], names["b"], bias=names["bias"], c=names["c"], backend="cpu")
    forward = len(kernels)
    out.sum().backward()
    assert len(kernels) - forward == sum(name in ("a", "b") for name in asked)
    assert [name for name, t in names.items() if t.grad is not None] == asked


def test_an_activation_computes_the_product_once(kernels):
    a, b, bias = torch.randn(6, 5), torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = ops.matmul(a, b, bias=bias, activation="gelu", backend="cpu")
    assert len(kernels) == 1
    out.sum().backward()
    assert kernels == [((6, 5), (5, 4)), ((5, 6), (6, 4))]
    with torch.no_grad():
        fused = ops.matmul(a, b, bias=bias, activation="gelu", backend="cpu")
    torch.testing.assert_close(out, fused)


def test_gradients_lie_in_memory_as_their_operands_do(kernels):
    weight = torch.randn(4, 5, requires_grad=True)
    a = torch.randn(5, 6).mT.requires_grad_()  # M-major
    ops.matmul(a, weight, trans_b=True, backend="cpu").sum().backward()
    assert weight.grad.is_contiguous()
    assert a.grad.stride() == a.stride()
    # dW (4, 5) = dZ.T @ A, written row-major; dA.T (5, 6) = W.T @ dZ.T
    assert kernels[1:] == [((5, 4), (4, 6)), ((4, 6), (6, 5))]


def test_activations_are_kept_only_for_a_weight_that_learns(kernels):
    x, frozen, learns = torch.randn(6, 5, requires_grad=True), torch.randn(5, 5), torch.randn(5, 5, requires_grad=True)
    for weight, kept in ((frozen, False), (learns, True)):
        hidden = x * 1.0
        alive = weakref.ref(hidden)
        out = ops.matmul(hidden, weight, backend="cpu")
        del hidden
        gc.collect()
        assert (alive() is not None) == kept
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_any_strides(backend, kernels):
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for dy in (torch.ones(1, 1).expand(6, 4), torch.randn(4, 6).mT, torch.randn(6, 8)[:, ::2], torch.zeros(6, 4)):
        made = torch.autograd.grad(ops.matmul(a, b, backend=backend), (a, b), dy)
        torch.testing.assert_close(made, (dy @ b.mT, a.mT @ dy))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_twice_and_one_graph_twice(backend, kernels):
    x = torch.randn(5, 5, requires_grad=True)
    out = ops.matmul(x, x, trans_b=True, backend=backend).sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    ones = torch.ones(5, 5)
    torch.testing.assert_close(once, ones @ x.detach() + ones.mT @ x.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_results_of_halves(backend, kernels):
    """The gradient of a float32 result arrives in float32 and is rounded to the operands' dtype once."""
    a, b = operands(20, 24, 32, "nt", HALF, "cpu")
    a.requires_grad_(), b.requires_grad_()
    dy = torch.randn(20, 24)
    da, db = torch.autograd.grad(ops.matmul(a, b, out_dtype=torch.float32, backend=backend), (a, b), dy)
    assert da.dtype == db.dtype == HALF
    check(da, dy.to(HALF), b.detach().mT)
    check(db, a.detach().mT, dy.to(HALF))


def test_a_strict_wish_is_a_preference_for_the_products_of_a_gradient(kernels):
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with record() as notes:
        ops.matmul(a, b, backend="cpu").sum().backward()
    assert [(op.key, wish) for op, _, wish, _ in notes.calls] == [
        ("matmul", "cpu!"),
        ("matmul_bwd", "cpu!"),
        ("matmul", "cpu"),
        ("matmul", "cpu"),
    ]


def test_autocast_does_not_change_the_numbers(kernels):
    for backend in BACKENDS:
        a, b = torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        plain = torch.autograd.grad(ops.matmul(a, b, backend=backend).sum(), (a, b))
        with torch.autocast("cpu", torch.bfloat16):
            cast = torch.autograd.grad(ops.matmul(a, b, backend=backend).sum(), (a, b))
        assert all(torch.equal(p, c) for p, c in zip(plain, cast, strict=True))


def test_what_has_no_gradient_says_so():
    a, b = torch.ones(4, 8), torch.ones(8, 4, requires_grad=True)
    with pytest.raises(InputError, match="alpha requires a gradient, and has none"):
        ops.matmul(a, b, alpha=torch.ones(1, requires_grad=True))
    with pytest.raises(InputError, match="out=.* has no gradient"):
        ops.matmul(a, b, out=torch.empty(4, 4))
    for lead in ((), (1,)):  # of the options together it is out= that is in the way
        function = ops.bmm if lead else ops.matmul
        with pytest.raises(InputError, match="out=.* has no gradient"):
            function(a.view(*lead, 4, 8), b.view(*lead, 8, 4), activation="relu", out=torch.empty(*lead, 4, 4))
    with pytest.raises(InputError, match="out=.* has no gradient"):
        ops.matmul(a.view(2, 2, 8), b, activation="relu", out=torch.empty(2, 2, 4))
    eight = a.to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(InputError, match="of float8 operands, which have none"):
        ops.matmul(eight, torch.ones(8, 4).to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match="call tilewright.ops.matmul, which takes it apart"):
        torch.ops.tilewright.matmul(a, b, None, None, None, 1.0, "relu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("place", KERNELS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_products_of_a_gradient_on_a_gpu(layout, place):
    a, b = operands(264, 392, 520, layout, HALF, "cuda")
    a.requires_grad_(), b.requires_grad_()
    bias = torch.randn(392, device="cuda", dtype=HALF, requires_grad=True)
    made = run(ops.matmul, a, b, place=place, bias=bias)
    dz = torch.randn_like(made)
    da, db, dbias = torch.autograd.grad(made, (a, b, bias), dz)
    check(da, dz, b.detach().mT)
    check(db, a.detach().mT, dz)
    check(dbias[None], torch.ones(1, 264, device="cuda", dtype=HALF), dz)
