"""Dense float8 products under DeepGEMM's names, against the float64 product of the same float8 numbers."""

import inspect

import pytest
import torch
from tests.compat.fp8 import assert_rounded, block, token

from tilewright import settings
from tilewright.compat import deep_gemm
from tilewright.errors import InputError

LAYOUTS = ("nt", "nn", "tn", "tt")
M, N, K = 24, 144, 272


def gemm(layout: str):
    return getattr(deep_gemm, f"fp8_gemm_{layout}")


def operands(layout: str = "nt", wgrad: bool = False):
    """Pairs a and b as `layout` has them, both contiguous with their scales; and A @ B in float64."""
    (a, left), (b, right) = token(M, K), (token if wgrad else block)(N, K, seed=2)
    if layout[0] == "t":
        a = tuple(t.mT.contiguous() for t in a)
    if layout[1] == "n":
        b = tuple(t.mT.contiguous() for t in b)
    return a, b, left @ right.mT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("wgrad", [False, True], ids=["1D2D", "1D1D"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d_is_overwritten_with_the_product(layout, wgrad, dtype):
    a, b, product = operands(layout, wgrad)
    d = torch.full((M, N), float("nan"), dtype=dtype)
    assert gemm(layout)(a, b, d, recipe=(1, 1, 128) if wgrad else None) is None
    assert_rounded(d, product)


@pytest.mark.parametrize("wgrad", [False, True], ids=["1D2D", "1D1D"])
def test_d_as_c_accumulates(wgrad):
    a, b, product = operands(wgrad=wgrad)
    d = torch.randn(M, N)
    before = d.double()
    deep_gemm.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1 if wgrad else 128, 128))
    assert_rounded(d, before + product)


def test_c_is_added_and_kept():
    a, b, product = operands()
    c = torch.randn(M, N)
    before, d = c.clone(), torch.full((M, N), float("nan"))
    deep_gemm.fp8_gemm_nt(a, b, d, c, alpha=-0.5)
    assert_rounded(d, before.double() - 0.5 * product)
    assert torch.equal(c, before)


def test_recipes_may_be_given_apart():
    a, b, product = operands(wgrad=True)
    d = torch.empty(M, N)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(1, 128), disable_ue8m0_cast=True)
    assert_rounded(d, product)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_stand_for_the_other_layouts(layout):
    a, b, _ = operands(layout)
    named, viewed = torch.empty(M, N), torch.empty(M, N)
    gemm(layout)(a, b, named)
    turned_a = tuple(t.T for t in a) if layout[0] == "t" else a
    turned_b = b if layout[1] == "t" else tuple(t.T for t in b)
    deep_gemm.fp8_gemm_nt(turned_a, turned_b, viewed)
    assert torch.equal(named, viewed)


@pytest.mark.parametrize("c", [None, torch.full((M, N), 3.0)], ids=["zero", "c"])
def test_an_empty_sum(c):
    a, b = ((torch.empty(rows, 0).to(torch.float8_e4m3fn), torch.empty(blocks, 0)) for rows, blocks in ((M, M), (N, 2)))
    d = torch.full((M, N), float("nan"))
    deep_gemm.fp8_gemm_nt(a, b, d, c)
    assert torch.equal(d, torch.zeros(M, N) if c is None else c)


def test_an_empty_sum_of_columns_of_wider_tensors():
    (a, b, _), d = operands(), torch.full((M, N), float("nan"))
    deep_gemm.fp8_gemm_nt((a[0][:, :0], a[1][:, :0]), (b[0][:, :0], b[1][:, :0]), d)
    assert (d == 0).all()


def test_scales_as_the_casts_write_them_need_no_fallback(monkeypatch):
    """DeepGEMM lays scales out in each call; forbidding what is slow must not forbid that."""
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    a = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    b = deep_gemm.per_block_cast_to_fp8(w, use_ue8m0=False)
    monkeypatch.setenv("TILEWRIGHT_DISABLE_FALLBACK", "1")
    settings.reload()
    try:
        d = torch.empty(M, N)
        deep_gemm.fp8_gemm_nt(a, b, d)
    finally:
        monkeypatch.undo()
        settings.reload()
    laid = deep_gemm.transform_sf_into_required_layout(a[1], M, K, (1, 128))
    assert laid.stride() != a[1].stride()
    again = torch.empty(M, N)
    deep_gemm.fp8_gemm_nt((a[0], laid), b, again)
    assert torch.equal(d, again)


def test_an_empty_result_is_left_alone():
    (a, b, _), d = operands(), torch.empty(0, N)
    deep_gemm.fp8_gemm_nt((a[0][:0], a[1][:0]), b, d)


def test_compiled_code_may_call_it():
    def step(a, sfa, b, sfb, d):
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, d)
        return d + 1

    a, b, _ = operands()
    d, eager = torch.ones(M, N), torch.ones(M, N)
    made = torch.compile(step, fullgraph=True, backend="aot_eager")(*a, *b, d)
    assert torch.equal(made, step(*a, *b, eager))
    assert torch.equal(d, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("splits", [(16, 8, 32), (48, 0, 0), (0, 5, 24)], ids=str)
def test_the_middle_of_heads_is_skipped(splits, dtype):
    left, mid, right = splits
    a, b, product = operands()
    heads = N // (left + right)
    d = torch.full((M, heads * sum(splits)), 7.0, dtype=dtype)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
    made, exact = d.unflatten(1, (heads, -1)), product.unflatten(1, (heads, -1))
    together = torch.cat((made[..., :left], made[..., left + mid :]), -1)
    assert_rounded(together.flatten(1), exact.flatten(1))
    assert (made[..., left : left + mid] == 7.0).all()


A, B, _ = operands()
BAD = {
    "a alone": (lambda d: (A[0], B, d), {}, r"a is a Tensor; needs a pair"),
    "a is bf16": (lambda d: ((A[0].bfloat16(), A[1]), B, d), {}, "a is torch.bfloat16; needs torch.float8_e4m3fn"),
    "packed scales": (lambda d: ((A[0], A[1].int()), B, d), {}, "powers of two packed for Blackwell"),
    "scales in bf16": (lambda d: (A, (B[0], B[1].bfloat16()), d), {}, "the scales of b are torch.bfloat16"),
    "scales of a token of b": (
        lambda d: (A, token(N, K)[0], d),
        {},
        r"the scales of b are \(144, 3\); 128x128 of \(144, 272\) are \(2, 3\).*recipe=\(1, 1, 128\)",
    ),
    "scales of blocks of b": (lambda d: (A, B, d), {"recipe": (1, 1, 128)}, r"1x128 of \(144, 272\) are \(144, 3\)"),
    "recipe of Blackwell": (lambda d: (A, B, d), {"recipe": (1, 1, 32)}, r"Hopper has 1x128"),
    "half a recipe": (lambda d: (A, B, d), {"recipe_a": (1, 128)}, "needs recipe, or recipe_a and recipe_b"),
    "K differs": (lambda d: (token(M, 128)[0], B, d), {}, "K is 128 in one and 272 in the other"),
    "d is transposed": (lambda d: (A, B, d.T), {}, r"d is \(144, 24\); needs \(M, N\) = \(24, 144\)"),
    "d is float16": (lambda d: (A, B, d.half()), {}, "d is torch.float16"),
    "c of another dtype": (lambda d: (A, B, d, d.bfloat16()), {}, "they need one shape and dtype"),
    "compiled_dims": (lambda d: (A, B, d), {"compiled_dims": "x"}, "needs letters of"),
    "scales elsewhere": (lambda d: ((A[0], A[1].to("meta")), B, d), {}, "scales_of_a is on meta, a on cpu"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_refused(args, options, message):
    d = torch.full((M, N), 5.0)
    with pytest.raises(InputError, match=message):
        deep_gemm.fp8_gemm_nt(*args(d), **options)
    assert (d == 5.0).all()


def test_heads_that_do_not_fit_are_refused():
    d = torch.empty(M, N + 3)
    with pytest.raises(InputError, match=r"b has 144 rows; with head_splits=\(100, 1, 0\)"):
        deep_gemm.fp8_gemm_nt_skip_head_mid(A, B, d, (100, 1, 0))
    with pytest.raises(InputError, match=r"d is \(24, 147\); needs .* = \(24, 150\)"):
        deep_gemm.fp8_gemm_nt_skip_head_mid(A, B, d, (16, 2, 32))


@pytest.mark.parametrize(("layout", "dims"), [("nt", "nk"), ("nn", "nk"), ("tn", "mn"), ("tt", "mn")])
def test_arguments_and_defaults_are_those_of_deep_gemm(layout, dims):
    """As its bindings declare them (csrc/apis/gemm.hpp): callers may pass any by position."""
    found = inspect.signature(gemm(layout)).parameters.values()
    names, defaults = [p.name for p in found], [p.default for p in found if p.default is not p.empty]
    own = ["recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast", "alpha"]
    assert names == ["a", "b", "d", "c", *own]
    assert defaults == [None, None, None, None, dims, False, None]
