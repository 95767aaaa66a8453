"""scaled_matmul: every element against the product of the dequantised operands, scales that lie anywhere, refusals."""

import logging

import pytest
import torch
from tests.ops.gemm import bounds
from tests.ops.gemm.bounds import FP8_SUM, PLACES, VIEWS, faults, run
from tests.ops.gemm.scaled_problems import OTHERS, PAIRS, every, operands

from tilewright import settings
from tilewright.errors import InputError
from tilewright.log import forget_logged
from tilewright.ops.gemm.matmul import matmul
from tilewright.ops.gemm.scaled import cublas as scaled_cublas
from tilewright.ops.gemm.scaled.args import plain_scaled_args, scaled_bucket
from tilewright.ops.gemm.scaled.scaling import GRANULARITIES, Scaling, granularity, kernel_layout, scaling_of
from tilewright.ops.gemm.scaled_matmul import CONTRACT, scaled_matmul
from tilewright.ops.quant.layout import BLOCK, ROW, TOKEN

FP8, HALF = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture
def logged(caplog):
    """What is logged, from a state in which nothing was said yet."""
    forget_logged()
    with caplog.at_level(logging.WARNING, "tilewright"):
        yield caplog
    forget_logged()


def exact_sums(a, b, options):
    """alpha * a @ b + bias."""
    bias = options.get("bias")
    return options.get("alpha", 1.0) * (a @ b) + (0 if bias is None else bias.double())


def check(made, problem, **options):
    """Each element is off by no more than a float32 sum, or on a GPU the tensor core's short one, may be."""
    a, b = problem.dequantised()
    wanted, off = bounds.exact(a, b, **options)
    if made.device.type == "cuda":
        short = 2 * FP8_SUM * (a.abs() @ b.abs())
        if options.get("activation") == "swiglu":  # off by what its factors are, each times the other
            z = exact_sums(a, b, options)
            short = 1.1 * short[..., 0::2] * z[..., 1::2].abs() + short[..., 1::2] * z[..., 0::2].abs()
        off = off + short
    assert made.shape == wanted.shape
    assert faults(made, wanted, off) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("out_dtype", [HALF, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_scaling(pair, out_dtype, place):
    for m, n, k in ((70, 200, 328), (1, 144, 272), (130, 64, 1040)):
        problem = operands(m, n, k, pair, device=place.device)
        check(run(scaled_matmul, *problem.public(), out_dtype=out_dtype, place=place), problem)


@pytest.mark.parametrize("pair", OTHERS)
def test_pairs_without_a_kernel_are_torchs(pair):
    problem = operands(140, 136, 272, pair)
    assert scaling_of(*problem) is Scaling.OTHER
    check(scaled_matmul(*problem.public()), problem)


@pytest.mark.parametrize("pair", ["row", "token_block", "token_token"])
def test_the_scale_of_a_neighbour_is_found_out(pair):
    """The bound of these tests is worth something."""
    problem = operands(140, 136, 272, pair)
    made = scaled_matmul(*problem.public())
    for name in ("scale_a", "scale_b"):
        for dim in (-1, -2):
            scales = getattr(problem, name)
            if scales.shape[dim] > 1:
                with pytest.raises(AssertionError):
                    check(made, problem._replace(**{name: scales.roll(1, dim)}))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_the_whole_epilogue(activation, place):
    problem = operands(36, 144, 272, device=place.device)
    bias, c = torch.randn(144), torch.randn(36, 72 if activation == "swiglu" else 144)
    options = {"bias": bias.to(place.device, HALF), "c": c.to(place.device, HALF), "alpha": 0.7}
    made = run(scaled_matmul, *problem.public(), activation=activation, place=place, **options)
    check(made, problem, activation=activation, **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
def test_operands_and_scales_that_lie_anywhere(view, place):
    for pair in PAIRS:
        problem = operands(36, 136, 272, pair, device=place.device)
        moved = tuple(VIEWS[view](t) for t in problem.public())
        made = run(scaled_matmul, *moved, place=place)
        if place.device == "cuda" and place.backend == "torch":  # cuBLAS has kernels of its own for each alignment
            check(made, problem)
        else:
            assert torch.equal(made, run(scaled_matmul, *problem.public(), place=place))


def test_flags_transpose_operands_and_their_scales():
    problem = operands(24, 136, 272)
    a, b, scale_a, scale_b = (t.mT for t in problem.public())
    made = scaled_matmul(a, b, scale_a, scale_b, trans_a=True, trans_b=True)
    assert torch.equal(made, scaled_matmul(*problem.public()))
    with pytest.raises(InputError, match="Scales are given as their operand is"):
        scaled_matmul(a, b, scale_a.mT, scale_b, trans_a=True, trans_b=True)


@pytest.mark.parametrize("pair", PAIRS)
def test_leading_dimensions(pair, logged):
    """Scales of a batch of activations, as a cast of all of it makes them, and one for all of them."""
    whole = operands(21, 136, 272, pair)
    flat, b, scale_a, scale_b = whole.public()
    a = flat.view(3, 7, 272)
    if scale_a.shape[0] > 1:
        layout = granularity(scale_a.shape, 21, 272)
        scale_a = layout.empty(7, 272, "cpu", 3).copy_(scale_a.unflatten(0, (3, 7)))
    made = scaled_matmul(a, b, scale_a, scale_b)
    assert torch.equal(made, scaled_matmul(*whole.public()).view(3, 7, 136))
    out = torch.full((3, 7, 136), torch.nan, dtype=HALF)
    assert scaled_matmul(a, b, scale_a, scale_b, out=out) is out
    assert torch.equal(out, made)
    copied = [line for line in logged.messages if "do not fold into 21 rows" in line]
    assert len(copied) == (1 if pair.startswith("token") else 0)


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_gradient_accumulates_in_place(place):
    problem = operands(136, 72, 400, "token_token", device=place.device)
    before = torch.randn(136, 72).to(place.device)
    total = before.clone()
    run(scaled_matmul, *problem.public(), c=total, out=total, out_dtype=torch.float32, place=place)
    check(total, problem, c=before)


def test_matmul_with_scales_is_this_op():
    problem = operands(20, 136, 272)
    bias = torch.randn(136).to(HALF)
    a, b, scale_a, scale_b = problem.public()
    made = matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, activation="silu")
    assert torch.equal(made, scaled_matmul(a, b, scale_a, scale_b, bias=bias, activation="silu"))
    with pytest.raises(InputError, match=r"scale_b is given and scale_a is not"):
        matmul(a, b, scale_b=scale_b)
    with pytest.raises(InputError, match="alpha is a Tensor; needs a number"):
        matmul(a, b, scale_a=scale_a, scale_b=scale_b, alpha=torch.ones(1))


@pytest.mark.parametrize("place", PLACES)
def test_nan_stays_in_the_block_whose_scale_it_is(place):
    problem = operands(40, 272, 272, device=place.device)
    problem.scale_a[3, 1] = torch.nan
    problem.scale_b[1, 0] = torch.nan
    made = run(scaled_matmul, *problem.public(), place=place)
    expected = torch.zeros_like(made, dtype=torch.bool)
    expected[3], expected[:, 128:256] = True, True
    assert torch.equal(made.isnan(), expected)


def test_a_gradient_is_refused():
    problem = operands(20, 136, 272)
    bias = torch.randn(136, dtype=HALF, requires_grad=True)
    with pytest.raises(InputError, match="a gradient is wanted of a product of float8"):
        scaled_matmul(*problem.public(), bias=bias)
    with torch.no_grad():
        scaled_matmul(*problem.public(), bias=bias)


# What scales are told from, and where they lie.


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (1, 128), (1, 272), (128, 128), (5, 100), (130, 128), (130, 272)])
def test_granularities_of_one_shape_mean_the_same(rows, depth):
    """So that shapes alone tell, and no caller has to."""
    for shape in {layout.shape(rows, depth) for layout in GRANULARITIES.values()}:
        scales = torch.rand(shape) + 1
        fitting = [layout for layout in GRANULARITIES.values() if layout.shape(rows, depth) == shape]
        assert granularity(shape, rows, depth) in fitting
        spread = [every(scales.expand(layout.shape(rows, depth)), rows, depth) for layout in fitting]
        assert all(torch.equal(spread[0], each) for each in spread)
    assert granularity((rows + 1, 1), rows, depth) is None


@pytest.mark.parametrize("pair", PAIRS)
def test_scales_that_the_casts_write_are_read_where_they_lie(pair, logged):
    a, b, scale_a, scale_b = operands(37, 136, 272, pair)
    of_a, of_b = scaling_of(a, b, scale_a, scale_b).layouts
    assert kernel_layout("op", "scale_a", scale_a, of_a, 37, 272) is scale_a
    assert kernel_layout("op", "scale_b", scale_b, of_b, 136, 272) is scale_b
    assert logged.messages == []


@pytest.mark.parametrize(
    ("layout", "rows", "change"),
    [
        pytest.param(TOKEN, 37, lambda s: s.contiguous(), id="K_major"),
        pytest.param(TOKEN, 37, lambda s: s.mT.contiguous().mT, id="lines_of_37"),
        pytest.param(TOKEN, 36, lambda s: torch.cat((s[:3], s)).mT.contiguous().mT[3:], id="misaligned"),
        pytest.param(BLOCK, 136, lambda s: s.mT.contiguous().mT, id="blocks_N_major"),
        pytest.param(ROW, 37, lambda s: s.expand(-1, 2)[:, :1].contiguous().repeat(1, 2)[:, :1], id="every_second_row"),
    ],
)
def test_other_layouts_are_copied_with_one_line_or_refused(layout, rows, change, logged, monkeypatch):
    scales = change(layout.empty(rows, 272, "cpu").copy_(torch.rand(layout.shape(rows, 272))))
    made = kernel_layout("op", "scale_a", scales, layout, rows, 272)
    assert layout.mismatch(made, rows, 272) is None
    assert torch.equal(made, scales)
    kernel_layout("op", "scale_a", scales, layout, rows, 272)
    (line,) = logged.messages
    assert "op: the scales scale_a" in line
    monkeypatch.setenv("TILEWRIGHT_DISABLE_FALLBACK", "1")
    settings.reload()
    with pytest.raises(InputError, match="TILEWRIGHT_DISABLE_FALLBACK forbids the copy"):
        kernel_layout("op", "scale_a", scales, layout, rows, 272)
    monkeypatch.undo()
    settings.reload()


def test_an_operand_along_mn_is_copied_with_one_line(logged):
    problem = operands(20, 136, 272)
    a, b, scale_a, scale_b = problem.public()
    expected = scaled_matmul(a, b, scale_a, scale_b)
    assert logged.messages == []
    for _ in range(2):
        assert torch.equal(scaled_matmul(a, b.contiguous(), scale_a, scale_b), expected)
    (line,) = logged.messages
    assert "b is not contiguous along K" in line


# cuBLAS, as far as a CPU can tell.


def test_padding_keeps_the_product():
    a, b, scale_a, scale_b = operands(37, 200, 328)
    left, right = scaled_cublas.padded(a, 16, 512), scaled_cublas.padded(b.mT, 128, 512)
    of_a, of_b = scaled_cublas.scales_for(Scaling.TOKEN_BLOCK, scale_a, scale_b, left, right)
    assert (left.shape, right.shape, of_a.shape, of_b.shape) == ((48, 512), (256, 512), (48, 4), (4, 2))
    assert (of_a.stride(), of_b.stride()) == ((1, 48), (1, 4))
    padded = (left.double() * every(of_a, 48, 512)) @ (right.double() * every(of_b.mT, 256, 512)).mT
    exact = (a.double() * every(scale_a, 37, 328)) @ (b.mT.double() * every(scale_b, 200, 328)).mT
    assert torch.allclose(padded[:37, :200], exact)
    assert scaled_cublas.padded(left, 16, 16) is left


def test_workloads_can_be_scaled_by_one_number_each():
    """That is what lets cuBLAS compete with per-tensor scales in the very same product."""
    from tilewright.ops.gemm.peers.scaled_matmul import _folded

    for pair in PAIRS:
        params = {"M": 40, "N": 272, "K": 640, "scaling": pair, "binary": True}
        a, b, scale_a, scale_b = CONTRACT.inputs(params, FP8, torch.device("cpu"), 0).args
        for q, scales in ((a, scale_a), (b.mT, scale_b.mT)):
            folded, least = _folded(q, scales)
            assert torch.equal(folded.double() * least.double(), q.double() * every(scales, *q.shape))
        assert pair == "tensor" or scale_a.unique().numel() > 4
    assert _folded(a, torch.rand(40, 5) + 1)[0] is None


@pytest.mark.parametrize("scaling", [s for s in Scaling if s is not Scaling.OTHER], ids=lambda s: s.name)
def test_cublas_gets_operands_and_scales_at_multiples_of_16_bytes(scaling):
    """Rows 1 to 17 of a batch, whose scales begin 4 bytes behind a multiple; the operands' pitch is 520 bytes."""
    whole, numbers = torch.randn(17, 520).to(torch.float8_e4m3fn), torch.rand(17 * 4)
    left, right = (scaled_cublas.padded(whole[1:, :512], 16, 512) for _ in range(2))
    shapes = [layout.shape(16, 512) for layout in scaling.layouts]
    scales = [numbers[1 : 1 + rows * columns].view(columns, rows).mT for rows, columns in shapes]
    found = scaled_cublas.scales_for(scaling, *scales, left, right)
    assert [t.data_ptr() % 16 for t in scales] == [4, 4]
    assert [t.data_ptr() % 16 for t in (left, right, *found)] == [0, 0, 0, 0]
    assert left.stride() == (512, 1)
    assert torch.equal(left.float(), whole[1:, :512].float())
    assert torch.equal(found[0].reshape(shapes[0]), scales[0])


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [
        (1, 1),
        (48, 64),
        (64, 64),
        (65, 96),
        (96, 96),
        (97, 128),
        (192, 192),
        (193, 256),
        (300, 384),
        (1536, 1536),
        (7168, 8192),
    ],
)
def test_buckets_of_many_rows_are_half_as_wide(rows, bucket):
    found = scaled_bucket(plain_scaled_args(*operands(rows, 32, 128, "tensor"), torch.bfloat16))
    assert found._asdict()["M"] == bucket
