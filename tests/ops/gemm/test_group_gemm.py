"""group_gemm: products of their own shapes; on Hopper each goes to its place, and empty ones launch nothing."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.gemm.group_gemm import FORWARD, GroupGemmArgs, offsets, reference
from tilewright.ops.gemm.kernels.sm90 import dense, dense_kernel, few_rows, group_gemm

HALF = torch.bfloat16


def operands(*sizes):
    """Pairs of random matrices (M, K) and (K, N)."""
    return [
        [torch.randn(*shape, dtype=HALF) for shape in shapes]
        for shapes in zip(*(((m, k), (k, n)) for m, n, k in sizes), strict=True)
    ]


@pytest.fixture
def launched(monkeypatch):
    """Sizes that were launched; torch multiplies in the engine's place."""
    found = []

    def gemm(d, args, config):
        found.append((d.shape[1], d.shape[2], args.a.shape[2], type(config)))
        d.copy_(torch.bmm(args.a.float(), args.b.float()))

    monkeypatch.setattr(dense_kernel, "gemm", gemm)
    monkeypatch.setattr(few_rows, "gemm", gemm)
    return found


def test_products_go_to_their_places(launched):
    a, b = operands((70, 72, 40), (0, 8, 56), (1, 136, 56), (9, 8, 0), (300, 40, 200))
    args = GroupGemmArgs(a[0], b[0], a[1:], b[1:], HALF)
    out = torch.full(FORWARD.outputs(*args)[0][0], torch.nan, dtype=HALF)
    group_gemm.launch((out,), args, None)
    made = [out[at : at + m * n].view(m, n) for at, m, n in zip(*offsets(args), strict=True)]
    for found, wanted in zip(made, reference(a, b), strict=True):
        torch.testing.assert_close(found, wanted)
    assert launched == [
        (70, 72, 40, dense.Config),
        (1, 136, 56, few_rows.Config),
        (300, 40, 200, dense.Config),
    ]


def test_rows_that_the_copy_engine_cannot_read_are_another_bucket():
    even, odd = operands((70, 72, 40), (64, 72, 40)), operands((70, 72, 40), (64, 72, 37))
    codes = [FORWARD.bucket_of((a[0], b[0], a[1:], b[1:], HALF), "default")[-1] for a, b in (even, odd)]
    assert codes == [1, 0]


def test_a_machine_without_the_kernel_says_so():
    with pytest.raises(Exception, match="cuda"):
        ops.group_gemm(*operands((8, 8, 8)), backend="cuda")


def test_it_is_a_loop_over_products_rounded_once():
    a, b = operands((70, 72, 40), (1, 136, 56), (5, 3, 70))
    for made, left, right in zip(ops.group_gemm(a, b), a, b, strict=True):
        torch.testing.assert_close(made.float(), left.float() @ right.float(), rtol=2**-8, atol=1e-5)
    wide = ops.group_gemm(a, b, out_dtype=torch.float32)
    assert [t.to(HALF).tolist() for t in wide] == [t.tolist() for t in ops.group_gemm(a, b)]


def test_results_are_views_of_one_allocation_at_multiples_of_16_elements():
    made = ops.group_gemm(*operands((5, 3, 8), (2, 2, 8), (7, 1, 8)))
    assert [t.storage_offset() for t in made] == [0, 16, 32]
    assert len({t.untyped_storage().data_ptr() for t in made}) == 1


def test_pairs_that_do_not_fit_are_named():
    a, b = operands((4, 4, 8), (4, 4, 8))
    with pytest.raises(InputError, match=r"a\[1\] is \(4, 7\) and b\[1\] is \(8, 4\)"):
        ops.group_gemm([a[0], a[1][:, :7]], b)
    with pytest.raises(InputError, match="has no gradient, and pair 1 requires one"):
        ops.group_gemm(a, [b[0], b[1].requires_grad_()])
