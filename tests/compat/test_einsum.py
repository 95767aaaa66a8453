"""DeepGEMM's einsums against float64."""

import importlib

import pytest
import torch
from tests.compat.fp8 import assert_rounded, block, token

from tilewright.compat import deep_gemm
from tilewright.errors import InputError

SIZES = {"b": 5, "h": 3, "r": 40, "d": 24, "m": 16, "n": 56, "k": 32}
EXPRESSIONS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")


def operands(expr: str):
    g = torch.Generator().manual_seed(5)
    first, second = expr.partition("->")[0].split(",")
    return [torch.randn([SIZES[x] for x in letters], generator=g).bfloat16() for letters in (first, second)]


@pytest.mark.parametrize("cublaslt", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_sums(expr, accumulate, dtype, cublaslt):
    a, b = operands(expr)
    wanted = torch.einsum(expr, a.double(), b.double())
    d = torch.randn(wanted.shape).to(dtype)
    before = d.double()
    deep_gemm.einsum(expr, a, b, d, c=d if accumulate else None, use_cublaslt=cublaslt)
    assert_rounded(d, wanted + before if accumulate else wanted)


@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr"])
def test_bf16_results_are_torchs_in_every_bit(expr, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a kernel with another order of sums")

    monkeypatch.setattr(importlib.import_module("tilewright.compat.deep_gemm.einsum"), "bmm", refuse)
    a, b = operands(expr)
    wanted = torch.einsum(expr, a, b)
    d = torch.full(wanted.shape, float("nan")).bfloat16()
    deep_gemm.einsum(expr, a, b, d)
    assert torch.equal(d, wanted)
    with pytest.raises(InputError, match="no gradient"):
        deep_gemm.einsum(expr, a.requires_grad_(), b, d)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("expr", "letter"), [("bmk,bnk->mn", "b"), ("bhr,hdr->bhd", "r"), ("bhd,bhr->hdr", "b")])
def test_a_sum_of_nothing(expr, letter, accumulate):
    a, b = operands(expr)
    first, second, out = expr.replace("->", ",").split(",")
    a, b = (t[(slice(None),) * x.index(letter) + (slice(0),)] for t, x in ((a, first), (b, second)))
    d = torch.full([SIZES[x] for x in out], 3.0)
    deep_gemm.einsum(expr, a, b, d, c=d if accumulate else None)
    assert (d == (3.0 if accumulate else 0.0)).all()


def test_weights_may_be_columns_of_wider_ones():
    a, _ = operands("bhr,hdr->bhd")
    wide = torch.randn(SIZES["h"], SIZES["d"], SIZES["r"] + 16).bfloat16()
    b, d = wide[..., : SIZES["r"]], torch.empty(SIZES["b"], SIZES["h"], SIZES["d"])
    deep_gemm.einsum("bhr,hdr->bhd", a, b, d)
    assert_rounded(d, torch.einsum("bhr,hdr->bhd", a.double(), b.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [(1, 128, 128), (1, 1, 128)], ids=["blocks", "tokens"])
def test_float8(recipe, dtype):
    b, h, d, r = 6, 3, 136, 272
    (x, left), (y, right) = token(b * h, r), (block if recipe[1] == 128 else token)(h, d, r)
    x = x[0].view(b, h, r), x[1].contiguous().view(b, h, -1)
    z = torch.full((b, h, d), float("nan"), dtype=dtype)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x, y, z, recipe=recipe)
    assert_rounded(z, torch.einsum("bhr,hdr->bhd", left.view(b, h, r), right))


def test_what_is_refused():
    a, b = operands("bhr,hdr->bhd")
    d = torch.empty(SIZES["b"], SIZES["h"], SIZES["d"])
    with pytest.raises(InputError, match="expr is 'ij,jk->ik'; there are 'bmk,bnk->mn'"):
        deep_gemm.einsum("ij,jk->ik", a, b, d)
    with pytest.raises(InputError, match="h is 3 in one and 2 in the other"):
        deep_gemm.einsum("bhr,hdr->bhd", a, b[1:], d)
    with pytest.raises(InputError, match=r"d is \(5, 3, 23\); needs \(b, h, d\) = \(5, 3, 24\)"):
        deep_gemm.einsum("bhr,hdr->bhd", a, b, d[..., 1:])
    with pytest.raises(InputError, match=r"a is torch.bfloat16; needs torch.float8"):
        deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a.float()), (b, b.float()), d)
    with pytest.raises(InputError, match="on Hopper there is 'bhr,hdr->bhd'"):
        deep_gemm.fp8_einsum("bhd,hdr->bhr", (a, a), (b, b), d)
    with pytest.raises(InputError, match="c is given"):
        deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a), (b, b), d, d)
