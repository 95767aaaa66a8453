"""Weight gradients of experts under DeepGEMM's names, against float64 sums group by group."""

import pytest
import torch
from tests.compat.fp8 import assert_rounded, token

from tilewright.compat import deep_gemm
from tilewright.errors import InputError

M, N = 24, 40
KS = {"bf16": [40, 0, 128, 1], "fp8": [128, 0, 384, 128]}


def flat(q: torch.Tensor, ks: list[int]) -> torch.Tensor:
    """(rows, T) as DeepGEMM's K-major groups: one matrix (rows, k) behind the other."""
    parts = [part.contiguous().view(torch.uint8).flatten() for part in q.split(ks, 1)]
    return torch.cat(parts).view(q.dtype)


def operands(form: str, ks: list[int]):
    """a and b as `form` has them, and their values in float64, (M, T) and (N, T)."""
    t = sum(ks)
    if form == "bf16_tn":
        g = torch.Generator().manual_seed(4)
        a, b = (torch.randn(t, rows, generator=g).bfloat16() for rows in (M, N))
        return a, b, a.double().mT, b.double().mT
    (a, left), (b, right) = token(M, t), token(N, t, seed=2)
    if form == "fp8_nt":
        return (flat(a[0], ks), a[1]), (flat(b[0], ks), b[1]), left, right
    return tuple(x.mT.contiguous() for x in a), tuple(x.mT.contiguous() for x in b), left, right


def gemm(form: str):
    kind, layout = form.split("_")
    return getattr(deep_gemm, f"k_grouped_{kind}_gemm_{layout}_contiguous")


def exact(left, right, ks):
    return torch.stack([x @ y.mT for x, y in zip(left.split(ks, 1), right.split(ks, 1), strict=True)])


@pytest.mark.parametrize("c", ["none", "another", "d"])
@pytest.mark.parametrize("form", ["bf16_tn", "fp8_tn", "fp8_nt"])
def test_sums_over_groups(form, c):
    ks = KS[form[: form.index("_")]]
    a, b, left, right = operands(form, ks)
    d = torch.randn(len(ks), M, N)
    other, before = torch.randn(len(ks), M, N), d.double()
    add = {"none": None, "another": other, "d": d}[c]
    wanted = exact(left, right, ks) + {"none": 0, "another": other.double(), "d": before}[c]
    gemm(form)(a, b, d, ks, torch.tensor(ks, dtype=torch.int32), add)
    assert_rounded(d, wanted)


@pytest.mark.parametrize("form", ["bf16_tn", "fp8_nt"])
def test_former_names_of_arguments(form):
    ks = KS[form[: form.index("_")]]
    a, b, left, right = operands(form, ks)
    d = torch.empty(len(ks), M, N)
    gemm(form)(a, b, d, ks=ks, ks_tensor=torch.tensor(ks, dtype=torch.int32), c=None)
    assert_rounded(d, exact(left, right, ks))


@pytest.mark.parametrize("form", ["bf16_tn", "fp8_tn"])
def test_no_sizes_on_the_host(form):
    ks = KS[form[: form.index("_")]]
    a, b, left, right = operands(form, ks)
    d = torch.empty(len(ks), M, N)
    gemm(form)(a, b, d, None, torch.tensor(ks, dtype=torch.int32))
    assert_rounded(d, exact(left, right, ks))


@pytest.mark.parametrize("form", ["bf16_tn", "fp8_nt"])
def test_groups_that_are_all_empty(form):
    a, b, *_ = operands(form, [0, 0])
    d, ks = torch.full((2, M, N), float("nan")), torch.zeros(2, dtype=torch.int32)
    gemm(form)(a, b, d, [0, 0], ks)
    assert (d == 0).all()


A, B, *_ = operands("fp8_nt", KS["fp8"])
LIST = KS["fp8"]
SIZES = torch.tensor(LIST, dtype=torch.int32)
BAD = {
    "sizes of 64 bits": ((A, B, LIST, SIZES.long()), {}, "torch.int64; needs"),
    "a group more": ((A, B, [*LIST, 0], SIZES), {}, "needs 4 sizes of groups, together 640"),
    "half a block": ((A, B, [64, 64, 384, 128], SIZES), {}, "each a multiple of 128"),
    "a is a matrix": (((A[0][1:], A[1]), B, LIST, SIZES), {}, "needs 15360 contiguous float8_e4m3fn"),
    "scales are transposed": (((A[0], A[1].mT), B, LIST, SIZES), {}, r"the scales of a are \(5, 24\)"),
    "another recipe": ((A, B, LIST, SIZES), {"recipe": (1, 1, 32)}, r"recipe is \(1, 1, 32\)"),
    "ends of groups": ((A, B, LIST, SIZES), {"use_psum_layout": True}, "use_psum_layout=True"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_refused(args, options, message):
    a, b, ks, sizes = args
    d = torch.full((4, M, N), 5.0)
    with pytest.raises(InputError, match=message):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, sizes, d, **options)
    assert (d == 5.0).all()
