"""Grouped products in which a dimension has size 0, or no group has rows: a gradient is there iff one is wanted, and it
is zeros; sums over nothing leave c.
"""

from itertools import product

import pytest
import torch
from tests.ops.gemm.bounds import run
from tests.ops.gemm.grouped_problems import FP8, HALF, int32, on_every_place

from tilewright import ops

SIZES = [size for size in product((0, 3), (0, 16), (0, 8)) if 0 in size]


def draw(*shape, device="cpu", dtype=torch.float32, learns=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(learns)


def by_groups(a, b, ends):
    """Rows of a group times its matrix; zeros behind the last group, with a gradient of zeros."""
    parts, start = [a[:0] @ b[:0].sum(0)], 0
    for g, end in enumerate(ends):
        parts.append(a[start:end] @ b[g])
        start = end
    return torch.cat((*parts, a.new_zeros(a.shape[0] - start, b.shape[-1])))


GROUPS = [(5, (), 16, 8), (0, (0, 0), 16, 8), (5, (0, 0), 16, 8), (5, (0, 5), 0, 8), (5, (2, 5), 16, 0), (0, (), 0, 0)]


@on_every_place
@pytest.mark.parametrize("wanted", ["both", "a", "b"])
@pytest.mark.parametrize(("rows", "ends", "n", "k"), GROUPS)
def test_grouped_matmul(rows, ends, n, k, wanted, place):
    device = place.device
    a = draw(rows, k, device=device, learns=wanted != "b")
    b = draw(len(ends), k, n, device=device, learns=wanted != "a")
    limits = int32(ends, device)
    made = run(ops.grouped_matmul, a, b, limits, place=place)
    assert made.shape == (rows, n)
    assert made.grad_fn is not None
    leaves = [t for t in (a, b) if t.requires_grad]
    dy = torch.randn(rows, n, device=device)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (a, b)]
    exact = by_groups(*wide, ends)
    covered = ends[-1] if ends else 0
    torch.testing.assert_close(made[:covered].double(), exact[:covered])
    found = torch.autograd.grad(made, leaves, dy)
    right = torch.autograd.grad(exact, [t for t in wide if t.requires_grad], dy.double())
    for leaf, value, other in zip(leaves, found, right, strict=True):
        assert (value.shape, value.dtype) == (leaf.shape, leaf.dtype)
        torch.testing.assert_close(value.double(), other, rtol=1e-4, atol=1e-4)


@on_every_place
@pytest.mark.parametrize(("rows", "ends", "n", "k"), GROUPS)
def test_halves_again_and_again(rows, ends, n, k, place):
    """What torch's own grouped kernel would take, were there anything; the second call and the third go another way."""
    a = draw(rows, k, device=place.device, dtype=HALF, learns=False)
    b = draw(len(ends), k, n, device=place.device, dtype=HALF, learns=False)
    covered = ends[-1] if ends else 0
    for _ in range(3):
        made = run(ops.grouped_matmul, a, b, int32(ends, place.device), place=place)
        assert made.shape == (rows, n)
        wanted = by_groups(a.double(), b.double(), ends)[:covered]
        torch.testing.assert_close(made[:covered].double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_grouped_matmul_with_an_activation_and_an_accumulated_gradient(activation):
    """Every expert's weight gets its gradient of zeros, as a distributed optimizer needs it."""
    a, b = draw(0, 8), draw(2, 8, 16)
    ops.grouped_matmul(a, b, int32((0, 0), "cpu"), activation=activation).sum().backward()
    assert torch.equal(b.grad, torch.zeros_like(b))
    b.grad = torch.ones_like(b)
    ops.grouped_matmul(a, b, int32((0, 0), "cpu"), activation=activation).sum().backward()
    assert torch.equal(b.grad, torch.ones_like(b))


@on_every_place
@pytest.mark.parametrize(("groups", "m", "n", "k"), [(0, 3, 16, 8), *((2, *size) for size in SIZES)])
def test_products_without_a_gradient(groups, m, n, k, place):
    device = place.device

    def half(*shape):
        return draw(*shape, device=device, dtype=HALF, learns=False)

    rows = int32([m] * groups, device)
    a, b = half(groups, m, k), half(groups, k, n)
    made = run(ops.masked_matmul, a, b, rows, place=place)
    torch.testing.assert_close(made.double(), a.double() @ b.double(), rtol=1e-2, atol=1e-2)
    ends = int32([0, k][:groups], device)
    left, right, c = half(m, k), half(k, n), torch.randn(groups, m, n, device=device)
    exact = torch.stack([torch.zeros_like(left.double() @ right.double()), left.double() @ right.double()])[:groups]
    summed = run(ops.k_grouped_matmul, left, right, ends, c=c, place=place)
    torch.testing.assert_close(summed.double(), exact + c, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        run(ops.k_grouped_matmul, left, right, ends, place=place).double(), exact, rtol=1e-3, atol=1e-3
    )
    kept = c.clone()
    run(ops.k_grouped_matmul, left, right, ends, c=kept, out=kept, place=place)
    torch.testing.assert_close(kept, summed)


@on_every_place
def test_pairs_of_no_rows_columns_or_depth(place):
    lefts = [draw(*s, device=place.device, dtype=HALF, learns=False) for s in ((0, 8), (4, 8), (3, 0), (3, 8))]
    rights = [draw(*s, device=place.device, dtype=HALF, learns=False) for s in ((8, 16), (8, 5), (0, 16), (8, 0))]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2,), (0,), (3,)):
        pairs = [(lefts[i], rights[i]) for i in order]
        made = run(ops.group_gemm, *map(list, zip(*pairs, strict=True)), place=place)
        for (left, right), d in zip(pairs, made, strict=True):
            torch.testing.assert_close(d.double(), left.double() @ right.double(), rtol=1e-2, atol=1e-2)


@on_every_place
@pytest.mark.parametrize(("groups", "m", "n", "k"), [(0, 3, 16, 128), *((2, *size) for size in SIZES)])
def test_float8(groups, m, n, k, place):
    device, blocks = place.device, -(-k // 128)
    a, b = (
        draw(groups, m, k, device=device, learns=False).to(FP8),
        draw(groups, n, k, device=device, learns=False).to(FP8),
    )
    scale_a, scale_b = (
        torch.ones(groups, m, blocks, device=device),
        torch.ones(groups, -(-n // 128), blocks, device=device),
    )
    rows = int32([m] * groups, device)
    made = run(ops.masked_matmul, a, b.mT, rows, scale_a=scale_a, scale_b=scale_b.mT, place=place)
    torch.testing.assert_close(made.double(), a.double() @ b.double().mT, rtol=1e-2, atol=1e-2)
    ends = int32([m * (g + 1) for g in range(groups)], device)
    scales = {"scale_a": scale_a.flatten(0, 1), "scale_b": scale_b.mT}
    flat = run(ops.grouped_matmul, a.flatten(0, 1), b.mT, ends, **scales, place=place)
    torch.testing.assert_close(flat.view(made.shape).double(), made.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("ends", [(0, 0), (0, 3)])
def test_compiled(ends):
    a, b = draw(ends[-1], 8), draw(2, 8, 16)
    step = torch.compile(ops.grouped_matmul, backend="aot_eager", fullgraph=True)
    made = step(a, b, int32(ends, "cpu"))
    assert made.grad_fn is not None
    da, db = torch.autograd.grad(made, (a, b), torch.ones_like(made))
    torch.testing.assert_close(da, torch.ones_like(made) @ b[1].mT)
    torch.testing.assert_close(db[1], a.mT @ torch.ones_like(made))
    assert db[0].eq(0).all()
