"""bmm: every matrix of a batch is matmul's, whatever strides the batch has."""

import pytest
import torch
from tests.ops.gemm.bounds import PLACES, VIEWS, check, operands, run

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.gemm.operands import LAYOUTS

HALF = torch.bfloat16
on_every_place = pytest.mark.parametrize("place", PLACES)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, dtype, place):
    a, b = operands(70, 136, 72, layout, dtype, place.device, lead=(3,))
    check(run(ops.bmm, a, b, place=place), a, b)


@on_every_place
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_every_epilogue(activation, place):
    a, b = operands(20, 80, 64, "nt", HALF, place.device, lead=(3,))
    options = {"activation": activation, "alpha": -0.5, "bias": torch.randn(80, device=place.device)}
    c = torch.randn(3, 20, 40 if activation == "swiglu" else 80, device=place.device)
    made = run(ops.bmm, a, b, place=place, c=c, **options)
    check(made, a, b, c=c, **options)
    total = c.clone()
    run(ops.bmm, a, b, place=place, c=total, out=total, out_dtype=torch.float32, **options)
    check(total, a, b, c=c, **options)


@on_every_place
def test_heads_of_attention(place):
    """(B, S, H, D) in memory: matrices of heads whose rows lie H * D apart; and the result in such memory."""
    batch, length, heads, width = 2, 24, 4, 32
    q, k = (torch.randn(batch, length, heads, width, device=place.device).to(HALF) for _ in range(2))
    for i in range(batch):
        a, b = q[i].transpose(0, 1), k[i].transpose(0, 1)
        check(run(ops.bmm, a, b, place=place, trans_b=True), a, b.mT)
    v = torch.randn(heads, length, width, device=place.device).to(HALF)
    weights = torch.rand(heads, length, length, device=place.device).to(HALF)
    out = torch.empty(length, heads, width, device=place.device, dtype=HALF).transpose(0, 1)
    run(ops.bmm, weights, v, place=place, out=out)
    check(out, weights, v)


@on_every_place
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_a_view_gives_what_a_copy_gives(view, place):
    a, b = operands(20, 40, 32, "nn", HALF, place.device, lead=(3,))
    check(run(ops.bmm, VIEWS[view](a), VIEWS[view](b), place=place), a, b)


@on_every_place
def test_one_b_for_all_and_every_second_matrix(place):
    a, b = operands(20, 40, 32, "nn", HALF, place.device, lead=(4,))
    shared = b[:1].expand(4, 32, 40)
    check(run(ops.bmm, a, shared, place=place), a, shared)
    check(run(ops.bmm, a[::2], b[1::2], place=place), a[::2], b[1::2])


@on_every_place
def test_a_batch_is_its_matrices(place):
    """Up to one rounding of the result: a batch may get other tiles than one matrix, and so another order of sums."""
    a, b = operands(64, 128, 256, "nt", HALF, place.device, lead=(5,))
    whole = run(ops.bmm, a, b, place=place)
    for i in range(5):
        alone = run(ops.bmm, a[i : i + 1], b[i : i + 1], place=place)
        if place.backend == "torch":  # another kernel of BLAS may be chosen
            check(alone, a[i : i + 1], b[i : i + 1])
        else:
            torch.testing.assert_close(alone[0], whole[i], rtol=2**-7, atol=2**-12)


def test_a_result_whose_matrices_overlap_is_refused():
    memory = torch.zeros(4, 6, 8)
    with pytest.raises(InputError, match="rows that do not overlap"):
        ops.bmm(torch.ones(2, 4, 8), torch.ones(2, 8, 8), out=memory.as_strided((2, 4, 8), (8, 8, 1)))
