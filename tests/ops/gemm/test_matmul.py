"""matmul: the formula, every layout and epilogue, views, aliases, special values; the same file on a CPU and a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.gemm.bounds import PLACES, VIEWS, check, exact, faults, operands, run

from tilewright import ops
from tilewright.dispatch import explain
from tilewright.errors import BackendError, InputError
from tilewright.ops.gemm.operands import LAYOUTS

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
ACTIVATIONS = (None, "relu", "gelu", "silu", "swiglu")
on_every_place = pytest.mark.parametrize("place", PLACES)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, dtype, place):
    a, b = operands(70, 136, 200, layout, dtype, place.device)
    check(run(ops.matmul, a, b, place=place), a, b)


@on_every_place
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, True), (True, False), (True, True)])
def test_a_transpose_is_its_strides(trans_a, trans_b, place):
    a, b = operands(24, 40, 56, "nn", HALF, place.device)
    given_a, given_b = (a.mT if trans_a else a), (b.mT if trans_b else b)
    flagged = run(ops.matmul, given_a, given_b, place=place, trans_a=trans_a, trans_b=trans_b)
    assert torch.equal(flagged, run(ops.matmul, a, b, place=place))


@on_every_place
@pytest.mark.parametrize("with_c", [None, HALF, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue(activation, with_bias, with_c, place):
    a, b = operands(36, 144, 64, "nt", HALF, place.device)
    options = {"alpha": 0.75}
    if activation is not None:
        options["activation"] = activation
    if with_bias:
        options["bias"] = torch.randn(144, device=place.device, dtype=HALF)
    if with_c is not None:
        options["c"] = torch.randn(36, 72 if activation == "swiglu" else 144, device=place.device, dtype=with_c)
    check(run(ops.matmul, a, b, place=place, **options), a, b, **options)


@on_every_place
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_result_dtype(out_dtype, place):
    a, b = operands(20, 72, 96, "nt", HALF, place.device)
    made = run(ops.matmul, a, b, place=place, out_dtype=out_dtype)
    assert made.dtype == out_dtype
    check(made, a, b)


@on_every_place
def test_swiglu_is_the_split_op_on_interleaved_columns(place):
    a, b = operands(36, 160, 64, "nt", HALF, place.device)
    z = run(ops.matmul, a, b, place=place, out_dtype=torch.float32)
    split = ops.swiglu(z[:, 0::2].contiguous(), z[:, 1::2].contiguous())
    fused = run(ops.matmul, a, b, place=place, activation="swiglu", out_dtype=torch.float32)
    torch.testing.assert_close(fused, split, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fused, ops.swiglu(z[:, :80].contiguous(), z[:, 80:].contiguous()), atol=0.1)


@on_every_place
def test_alpha_on_the_device_is_alpha(place):
    a, b = operands(20, 72, 96, "nt", HALF, place.device)
    bias = torch.randn(72, device=place.device)
    for alpha in (torch.tensor([0.3]), torch.tensor(0.3)):
        made = run(ops.matmul, a, b, place=place, alpha=alpha.to(place.device), bias=bias)
        check(made, a, b, alpha=alpha, bias=bias)


@on_every_place
def test_float8_with_the_product_of_its_scales(place):
    a, b = operands(64, 128, 256, "nt", torch.float32, place.device)
    a8, b8 = a.to(FP8), (16 * b).to(FP8)
    scale = torch.tensor([1 / 16], device=place.device)
    made = run(ops.matmul, a8, b8, place=place, alpha=scale)
    assert made.dtype == HALF
    check(made, a8, b8, alpha=scale)
    check(run(ops.matmul, a8, b8, place=place, alpha=scale, out_dtype=torch.float32), a8, b8, alpha=scale)


@on_every_place
def test_leading_dimensions_fold_into_rows(place):
    a, b = operands(6, 40, 32, "nt", HALF, place.device)
    c = torch.randn(6, 40, device=place.device)
    flat = run(ops.matmul, a, b, place=place, c=c)
    made = run(ops.matmul, a.view(2, 3, 32), b, place=place, c=c.view(2, 3, 40))
    assert made.shape == (2, 3, 40)
    assert torch.equal(made.view(6, 40), flat)
    heads = a.view(2, 3, 32).transpose(0, 1)  # does not fold: one copy
    assert torch.equal(run(ops.matmul, heads, b, place=place), run(ops.matmul, heads.contiguous(), b, place=place))
    turned = a.view(2, 3, 32).mT.contiguous()
    assert torch.equal(run(ops.matmul, turned, b, place=place, trans_a=True, c=c.view(2, 3, 40)).view(6, 40), flat)


# What must not pass, and what must pass through.


@pytest.mark.parametrize("fault", ["swapped tiles", "lost step of K", "second rounding", "one element"])
def test_the_bounds_find_a_wrong_tile(fault):
    """One 64x64 tile of 64 is wrong."""
    a, b = operands(512, 512, 512, "nt", HALF, "cpu")
    wanted, off = exact(a, b)
    made = wanted.to(torch.float32)
    tile = made[128:192, 320:384]
    if fault == "swapped tiles":
        tile.copy_(wanted[192:256, 320:384])
    elif fault == "lost step of K":
        tile.sub_((a[128:192, 496:].double() @ b[496:, 320:384].double()).float())
    elif fault == "second rounding":
        tile.copy_(tile.bfloat16())
    else:
        tile[17, 5] += 0.01
    assert faults(made, wanted, off) == [(2, 5)]
    assert faults(wanted.to(torch.float32), wanted, off) == []
    assert faults(wanted.to(HALF), wanted, off) == []


@on_every_place
@pytest.mark.parametrize("layout", LAYOUTS)
def test_magnitudes_over_twenty_octaves(layout, place):
    a, b = operands(72, 136, 264, layout, HALF, place.device, magnitudes=20)
    check(run(ops.matmul, a, b, place=place), a, b)


@on_every_place
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "swiglu"])
def test_nan_and_infinity_reach_what_they_reach_and_nothing_else(activation, place):
    a, b = operands(70, 144, 80, "nt", torch.float32, place.device)
    a, b = a.abs() + 0.1, b.abs() + 0.1
    a[3, 79], b[1, 77], a[69, 0] = torch.nan, torch.nan, torch.inf
    a, b = a.to(HALF), b.to(HALF)
    made = run(ops.matmul, a, b, place=place, activation=activation)
    wanted, _ = exact(a, b, activation=activation)
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.isinf(), wanted.isinf())
    assert bool(wanted.isinf().any()) and bool(wanted.isnan().any())


@on_every_place
def test_infinity_times_zero_is_not_a_number(place):
    a, b = operands(8, 16, 32, "nt", HALF, place.device)
    a[2, 5], b[5, 3] = torch.inf, 0.0
    made = run(ops.matmul, a, b, place=place)
    assert bool(made[2, 3].isnan()) and int(made.isnan().sum()) == 1


@on_every_place
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_size_layout_and_view(place, data):
    size = st.one_of(st.integers(1, 20), st.sampled_from([31, 63, 64, 65, 97, 127, 129, 257]))
    m, n, k = data.draw(size), data.draw(size), data.draw(size)
    layout = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    n += n % 2 if activation == "swiglu" else 0
    a, b = operands(m, n, k, layout, dtype, place.device)
    view_a, view_b = data.draw(st.sampled_from(sorted(VIEWS))), data.draw(st.sampled_from(sorted(VIEWS)))
    a, b = VIEWS[view_a](a), VIEWS[view_b](b)
    options = {"activation": activation}
    if data.draw(st.booleans()):
        options["bias"] = torch.randn(n, device=place.device).to(dtype)
    if data.draw(st.booleans()):
        n_out = n // 2 if activation == "swiglu" else n
        c = torch.randn(m, n_out, device=place.device)
        options["c"] = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))](c)
    refused = BackendError if place.backend != "torch" else ()  # a kernel may say no in words, the reference may not
    try:
        made = ops.matmul(a, b, **options, backend=place.backend)
    except refused:
        return
    check(made, a, b, **options)


@on_every_place
@pytest.mark.parametrize("which", ["a", "b", "both", "c", "bias"])
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_a_view_gives_what_a_copy_gives(view, which, place):
    a, b = operands(36, 72, 64, "nn", HALF, place.device)
    bias, c = torch.randn(72, device=place.device, dtype=HALF), torch.randn(36, 72, device=place.device)
    given = {"a": a, "b": b, "bias": bias, "c": c}
    for name in ("a", "b") if which == "both" else (which,):
        given[name] = VIEWS[view](given[name])
    made = run(ops.matmul, given["a"], given["b"], place=place, bias=given["bias"], c=given["c"])
    check(made, a, b, bias=bias, c=c)


@on_every_place
def test_expanded_operands(place):
    row, b = torch.randn(1, 64, device=place.device).to(HALF), operands(8, 40, 64, "nn", HALF, place.device)[1]
    a = row.expand(8, 64)
    check(run(ops.matmul, a, b, place=place), a, b)
    scalar = torch.ones(1, 1, device=place.device, dtype=HALF).expand(8, 64)
    check(run(ops.matmul, scalar, b, place=place), scalar, b)


@on_every_place
@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (8, 0, 16), (8, 16, 0), (0, 0, 0)])
def test_nothing(m, n, k, place):
    a, b = torch.ones(m, k, device=place.device, dtype=HALF), torch.ones(k, n, device=place.device, dtype=HALF)
    bias = torch.randn(n, device=place.device, dtype=HALF)
    made = run(ops.matmul, a, b, place=place, bias=bias)
    assert torch.equal(made, bias.expand(m, n))
    out = torch.full((m, n), torch.nan, device=place.device, dtype=HALF)
    run(ops.matmul, a, b, place=place, bias=bias, out=out)
    assert torch.equal(out, bias.expand(m, n))


# out= and c=.


@on_every_place
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_c_may_be_out(activation, place):
    a, b = operands(70, 144, 64, "nt", HALF, place.device)
    c = torch.randn(70, 72 if activation else 144, device=place.device)
    before = c.clone()
    for total in (c, c[:]):  # itself, or another tensor of the same elements
        total.copy_(before)
        made = run(ops.matmul, a, b, place=place, activation=activation, c=c, out=total, out_dtype=torch.float32)
        assert made is total
        check(made, a, b, activation=activation, c=before)


def test_c_may_not_lie_across_out():
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    memory = torch.zeros(5, 16)
    with pytest.raises(InputError, match="shares memory with an input"):
        ops.matmul(a, b, c=memory[:4], out=memory[1:])
    with pytest.raises(InputError, match="shares memory with an input"):
        ops.matmul(memory[:4], torch.ones(16, 16), out=memory[:4])
    assert not memory.any()


@on_every_place
@pytest.mark.parametrize("view", ["padded_rows", "columns", "misaligned"])
def test_out_may_be_rows_of_a_wider_matrix(view, place):
    a, b = operands(36, 72, 64, "nt", HALF, place.device)
    out = VIEWS[view](torch.full((36, 72), torch.nan, device=place.device, dtype=HALF))
    everything = torch.empty(0, dtype=HALF, device=place.device).set_(out.untyped_storage())
    around = everything.clone()
    assert run(ops.matmul, a, b, place=place, out=out) is out
    check(out, a, b)
    assert torch.equal(out, run(ops.matmul, a, b, place=place))
    out.copy_(torch.full_like(out, torch.nan))
    assert torch.equal(everything.isnan(), around.isnan())  # and what is not NaN around it is as it was
    assert torch.equal(everything[~around.isnan()], around[~around.isnan()])


@on_every_place
def test_out_with_leading_dimensions(place):
    a, b = operands(6, 40, 32, "nt", HALF, place.device)
    out = torch.empty(2, 3, 40, device=place.device, dtype=HALF)
    assert run(ops.matmul, a.view(2, 3, 32), b, place=place, out=out) is out
    check(out.view(6, 40), a, b)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (torch.zeros(4, 15), r"needs \(4, 16\) torch.float32"),
        (torch.zeros(4, 16, dtype=HALF), r"needs \(4, 16\) torch.float32"),
        (torch.zeros(16, 4).mT, "needs contiguous rows"),
        (torch.zeros(4, 32)[:, ::2], "needs contiguous rows"),
        (torch.zeros(1, 16).expand(4, 16), "needs rows that do not overlap"),
        (torch.zeros(4, 16, device="meta"), "on meta"),
        ([1.0], "out is a list; needs a torch.Tensor"),
    ],
)
def test_an_out_that_cannot_be_written(out, match):
    with pytest.raises(InputError, match=match):
        ops.matmul(torch.ones(4, 8), torch.ones(8, 16), out=out)
    assert isinstance(out, list) or out.is_meta or not out.any()


def test_dimensions_of_one_element_fold():
    a, b = torch.randn(2, 1, 3, 8), torch.randn(8, 16)
    out = torch.zeros(2, 3, 16).unsqueeze(1)
    ops.matmul(a, b, out=out)
    torch.testing.assert_close(out, a @ b)
    across = torch.zeros(2, 1, 5, 16)[:, :, :3]  # its rows are two blocks, whatever stride the middle one has
    with pytest.raises(InputError, match="its leading dimensions must fold"):
        ops.matmul(a, b, out=across)
    turned = torch.zeros(3, 2, 16).transpose(0, 1)[:, :1]
    ops.matmul(a[:, :, 0], b, out=turned)
    torch.testing.assert_close(turned, a[:, :, 0] @ b)


def test_an_out_that_does_not_fold():
    a, b = torch.ones(2, 3, 8), torch.ones(8, 16)
    with pytest.raises(InputError, match="its leading dimensions must fold"):
        ops.matmul(a, b, out=torch.zeros(3, 2, 16).transpose(0, 1))
    with pytest.raises(InputError, match=r"leading dimensions are \(2, 3\)"):
        ops.matmul(a, b, out=torch.zeros(3, 2, 16))
    with pytest.raises(InputError, match=r"leading dimensions are \(2, 3\)"):
        ops.matmul(a, b, out=torch.zeros(6, 16))


def test_autograd_hears_that_out_was_overwritten():
    x = torch.randn(4, 4, requires_grad=True)
    y = x.exp()  # saves its result
    with torch.no_grad():
        ops.matmul(torch.ones(4, 8), torch.ones(8, 4), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Refusals beyond the contract's list, which tests/ops/test_contracts.py goes through.


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((1.0, torch.ones(8, 4)), {}, "a is a float; needs a torch.Tensor"),
        ((torch.ones(4, 8), [1.0]), {}, "b is a list; needs a torch.Tensor"),
        ((torch.ones(8), torch.ones(8, 4)), {}, "Add a dimension with unsqueeze"),
        ((torch.ones(4, 8), torch.ones(8)), {}, "Add a dimension with unsqueeze"),
        ((torch.ones(4, 8), torch.ones(8, 4, device="meta")), {}, "Move them to one device"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"bias": torch.ones(4, device="meta")}, "bias is on meta"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"c": [1.0]}, "c is a list; needs a tensor"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"c": torch.ones(4, 4).double()}, "c is torch.float64; needs"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"bias": torch.ones(4).double()}, "bias is torch.float64; needs"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"alpha": torch.ones(1, device="meta")}, "alpha is .* on meta"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"alpha": None}, "alpha is a NoneType"),
        ((torch.ones(4, 8), torch.ones(8, 4)), {"out_dtype": "bf16"}, "out_dtype is bf16; of"),
        ((torch.ones(4, 8).double(), torch.ones(8, 4).double()), {"out_dtype": HALF}, "it may be float64"),
    ],
)  # fmt: skip
def test_refusals(args, options, match):
    with pytest.raises(InputError, match=match):
        ops.matmul(*args, **options)


def test_out_is_explained_and_traced_without_memory():
    a, b, out = torch.ones(4, 8), torch.ones(8, 16), torch.zeros(4, 16)
    assert explain("matmul", a, b, c=out, out=out).backend == "torch"
    assert not out.any()
    meta = out.to("meta")
    assert ops.matmul(a.to("meta"), b.to("meta"), out=meta) is meta


def test_functorch():
    a, b = torch.randn(3, 4, 8), torch.randn(8, 16)
    torch.testing.assert_close(torch.func.vmap(lambda x: ops.matmul(x, b))(a), a @ b)
    for activation in (None, "relu"):
        made = torch.func.grad(lambda x, act=activation: ops.matmul(x, b, activation=act).sum())(a[0])
        mask = 1.0 if activation is None else (a[0] @ b > 0).float()
        torch.testing.assert_close(made, (torch.ones(4, 16) * mask) @ b.mT)


def test_explain_names_what_a_choice_depends_on():
    a, b = operands(5, 48, 64, "tt", HALF, "cpu")
    said = explain("matmul", a, b, out_dtype=torch.float32)
    assert said.bucket == "M=8,N=48,K=64,layout=3,aligned=0,out_bits=32,epilogue=0"  # rows of a.T are 10 bytes
    said = explain("matmul", *operands(8, 48, 64, "nt", HALF, "cpu"), activation="swiglu")
    assert said.bucket == "M=8,N=48,K=64,layout=0,aligned=1,out_bits=16,epilogue=1"
    a, b = operands(8, 48, 64, "nt", HALF, "cpu")
    bias, c = torch.ones(48, dtype=HALF), torch.ones(8, 48)
    for options, epilogue in (
        ({"bias": bias, "alpha": 2.0}, 0),
        ({"c": c.to(HALF)}, 2),  # cuBLAS rounds the product before it adds c
        ({"bias": bias, "c": c.to(HALF)}, 2),
        ({"c": c, "out_dtype": torch.float32}, 2),
        ({"activation": "gelu"}, 2),
        ({"alpha": torch.ones(1)}, 2),
    ):
        assert explain("matmul", a, b, **options).bucket.endswith(f"epilogue={epilogue}"), options


@on_every_place
@pytest.mark.parametrize("options", [(), ("c",), ("bias",), ("bias", "c")], ids=str)
def test_nothing_of_nan_is_nan(options, place):
    """alpha = 0 is a factor: BLAS would leave the product out."""
    a, b = operands(20, 24, 64, "nt", HALF, place.device)
    a[3, 5], b[7, 2] = torch.nan, torch.inf
    given = {"c": torch.ones(20, 24, device=place.device), "bias": torch.ones(24, device=place.device)}
    given = {name: given[name].to(HALF) for name in options}
    made = run(ops.matmul, a, b, alpha=0.0, place=place, **given)
    wanted = torch.full((20, 24), float(len(options)))
    wanted[3], wanted[:, 2] = torch.nan, torch.nan
    torch.testing.assert_close(made.cpu().float(), wanted, equal_nan=True)
    batch = {name: t[None] if name == "c" else t for name, t in given.items()}
    assert torch.equal(run(ops.bmm, a[None], b[None], alpha=0.0, place=place, **batch)[0].isnan(), made.isnan())
