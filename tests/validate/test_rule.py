"""The accuracy rule: what passes, what fails, and that it is calm about right results."""

import math

import pytest
import torch
from torch.nn.functional import silu

from tilewright.validate.oracle import JITTERS
from tilewright.validate.rule import standard

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def product_standard(shape, dtype, seed=0, factor=2.0, scales=1.0):
    """The standard for silu(a) * b, with its inputs; b's rows are scaled."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=g) for _ in range(2))
    a, b = a.to(dtype), (b * scales).to(dtype)
    noisy = [silu(a.float() * (1 + 6e-8 * torch.randn(shape, generator=g))) * b.float() for _ in range(JITTERS)]
    return standard("y", silu(a.double()) * b.double(), silu(a) * b, noisy, factor), a, b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_passes_its_own_test(dtype):
    wanted, a, b = product_standard((100, 200), dtype)
    measure = wanted.judge(silu(a) * b)
    assert measure.faults == ()
    assert measure.error == measure.error_torch > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (33, 65), (200, 300), (3, 5000)], ids=str)
def test_a_right_result_passes_whatever_the_numbers(dtype, shape):
    """Rounded once from float32, by another formula: never refused, over many seeds."""
    for seed in range(20):
        wanted, a, b = product_standard(shape, dtype, seed)
        ours = (a.float() * b.float() / (1 + torch.exp(-a.float()))).to(dtype)
        assert wanted.judge(ours).faults == (), f"seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((slice(64, 128), slice(64, 128)), "tile [64:128, 64:128]"),
        ((slice(7, 8), slice(None)), "row 7"),
        ((slice(None), slice(299, 300)), "column 299"),
    ],
    ids=["tile", "row", "column"],
)
def test_one_wrong_part_fails_and_is_named(dtype, place, words):
    """Four times torch's own error in one part only."""
    wanted, a, b = product_standard((200, 300), dtype)
    ours = silu(a) * b
    error = ours.double() - wanted.exact
    part = wanted.exact[place]
    scale = 4 * max(float(error.norm() / wanted.exact.norm()), torch.finfo(dtype).eps)
    ours[place] = (part * (1 + scale)).to(dtype)
    faults = wanted.judge(ours).faults
    assert any(words in fault for fault in faults), faults


ONE_OF_MANY = {  # scales of 16 rows; row 7 is off by a quarter of its own root mean square
    "one is large": ([1e6] + [1.0] * 15, torch.bfloat16),
    "one is large, in half precision": ([6e4] + [0.06] * 15, torch.float16),
    "some are large": ([1e6] * 6 + [1.0] * 10, torch.float32),
    "it is small": ([1.0] * 7 + [1e-6] + [1.0] * 8, torch.bfloat16),
    "it is small, in single precision": ([1.0] * 7 + [1e-9] + [1.0] * 8, torch.float32),
    "every size": ([10.0 ** (k - 8) for k in range(16)], torch.bfloat16),
}


@pytest.mark.parametrize("name", ONE_OF_MANY)
def test_a_row_is_judged_by_its_own_size(name):
    sizes, dtype = ONE_OF_MANY[name]
    scales = torch.tensor(sizes)[:, None] / (8 if dtype == torch.float16 else 1)
    for seed in range(10):
        wanted, a, b = product_standard((16, 512), dtype, seed, scales=scales)
        ours = silu(a) * b
        assert wanted.judge(ours).faults == ()
        off = (
            0.25 * wanted.exact[7].square().mean().sqrt() * torch.randn(512, generator=torch.Generator().manual_seed(1))
        )
        ours[7] = (wanted.exact[7] + off).to(dtype)
        assert any("row 7 " in fault for fault in wanted.judge(ours).faults), seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 64), (64, 16), (200, 300)], ids=str)
def test_right_rows_of_every_size_pass(dtype, shape):
    """Rounded once from float32, by another formula, rows from 1e-4 to 1e4: never refused, over many seeds."""
    for seed in range(40):
        exponents = 8 * torch.rand(shape[0], 1, generator=torch.Generator().manual_seed(seed)) - 4
        wanted, a, b = product_standard(shape, dtype, seed, scales=10.0**exponents)
        ours = (a.float() * b.float() / (1 + torch.exp(-a.float()))).to(dtype)
        assert wanted.judge(ours).faults == (), f"seed {seed}"


@pytest.mark.parametrize("columns", [False, True])
def test_sums_of_a_large_row_are_judged_by_it(columns):
    """Products a @ b in another order: a row of a, or a column of b, 1000 times larger than the others."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        a, b = torch.randn(48, 96, generator=g), torch.randn(96, 80, generator=g)
        (b.mT if columns else a)[5] *= 1000
        noisy = [(a * (1 + 6e-8 * torch.randn(a.shape, generator=g))) @ b for _ in range(JITTERS)]
        wanted = standard("y", a.double() @ b.double(), a @ b, noisy, 2.0)
        chunks = sum(x @ y for x, y in zip(a.split(8, 1), b.split(8), strict=True))
        assert wanted.judge(chunks).faults == (), seed
        wrong = a @ b
        wrong[7, :5] *= 1 + 2.0**-12
        wrong[7, 6:] *= 1 + 2.0**-12
        assert wanted.judge(wrong).faults != (), seed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ten_times_the_error_fails(dtype):
    """In float32 the floor alone is about five roundings."""
    wanted, a, b = product_standard((200, 300), dtype)
    ours = silu(a) * b
    worse = (ours.double() + 9 * (ours.double() - wanted.exact)).to(dtype)
    assert any("of its norm" in fault for fault in wanted.judge(worse).faults)


def test_nan_never_passes_even_where_torch_has_it():
    """The oracle is finite: torch's own NaN in that dtype is no excuse."""
    exact = torch.ones(4, 8, dtype=torch.float64)
    baseline = exact.half()
    baseline[0, 0] = torch.nan
    wanted = standard("y", exact, baseline, [exact.float()], 2.0)
    assert any(
        "1 elements are NaN, the oracle has 0; first difference at (0, 0)" in f for f in wanted.judge(baseline).faults
    )


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        (torch.nan, "elements are NaN"),
        (-torch.inf, "elements are -inf"),
        (65504.0, "elements are +inf"),
    ],
)
def test_infinities_stand_where_the_oracle_has_them(got, fault):
    """1e6 overflows float16, so +inf is right there and only there."""
    exact = torch.full((2, 16), 2.0, dtype=torch.float64)
    exact[1, 3] = 1e6
    wanted = standard("y", exact, exact.half(), [exact.float()], 2.0)
    assert wanted.judge(exact.half()).faults == ()
    ours = exact.half()
    ours[1, 3] = got
    assert any(fault in f for f in wanted.judge(ours).faults)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (torch.zeros(3, 4), "has shape, dtype, device"),
        (torch.zeros(4, 3, dtype=torch.float16), "has shape, dtype, device"),
        (None, "is None"),
        (3.0, "is 3.0"),
    ],
    ids=str,
)
def test_structure(ours, words):
    exact = torch.ones(4, 3, dtype=torch.float64)
    wanted = standard("y", exact, exact.float(), [exact.float()], 2.0)
    assert words in wanted.judge(ours).faults[0]


def test_none_is_a_zero_gradient():
    exact = torch.zeros(4, 3, dtype=torch.float64)
    assert standard("dx", exact, exact.float(), [exact.float()], 3.0).judge(None).faults == ()


def test_empty_tensors_are_judged_by_shape():
    exact = torch.zeros(0, 3, dtype=torch.float64)
    wanted = standard("y", exact, exact.float(), [], 2.0)
    assert wanted.judge(torch.zeros(0, 3)).faults == ()
    assert wanted.judge(torch.zeros(3, 0)).faults != ()


def test_a_vanishing_gradient_is_allowed_its_cancellation():
    """d/dx of x / |x| is zero but for eps; float32 leaves noise of one rounding, torch by luck none at all."""
    g = torch.Generator().manual_seed(0)
    x, eps = torch.randn((5, 1), generator=g, dtype=torch.float64), 1e-6

    def gradient(x):
        rstd = torch.rsqrt(x * x + eps)
        return rstd - x * x * rstd**3

    noisy = [gradient(x.float() * (1 + 6e-8 * torch.randn((5, 1), generator=g))) for _ in range(JITTERS)]
    wanted = standard("dx", gradient(x), gradient(x).float(), noisy, 3.0)
    assert wanted.judge(gradient(x.float())).faults == ()
    assert wanted.judge(gradient(x.float()) + 1e-4).faults != ()


@pytest.mark.parametrize("empty", [0, 4096])
def test_rows_that_are_zero_leave_the_others_their_cancellation(empty):
    """A row whose terms cancel is compared with the rows that have values, however many a mask leaves without any."""
    exact = torch.randn(512 + empty, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact[0], exact[512:] = 1e-17, 0.0
    wanted = standard("dx", exact, exact.float(), [exact.float()], 3.0)
    off = torch.zeros_like(exact)
    off[0] = 1.1e-6
    assert wanted.judge((exact + off).float()).faults == ()
    assert any("row 0 off by" in fault for fault in wanted.judge((exact + 10 * off).float()).faults)


@pytest.mark.parametrize("seed", range(20))
def test_terms_that_cancel_are_rounded_as_torch_rounds_them(seed):
    """Rows (dp - delta) k of a gradient, delta a rounded number.  In row 3 the two cancel; there torch's rounding is
    small by luck, and ours as large as elsewhere.  32 times as much is a fault.
    """
    g = torch.Generator().manual_seed(seed)
    dp, k = torch.randn(64, generator=g), torch.randn(64, 64, generator=g).bfloat16()
    delta, usual = dp * (torch.rand(64, generator=g) - 0.5), 2.0**-9 / 3**0.5
    delta[3] = 0.97 * dp[3]

    def uniform(size):
        return size * (2 * torch.rand(64, generator=g) - 1)

    def rows(dp, delta):
        return (dp - delta)[:, None] * k.to(dp.dtype)

    def off_in_row_3(error):
        off = uniform(2.0**-9)
        off[3] = error
        return rows(dp, delta + dp * off).bfloat16()

    exact = dp.double(), delta.double()  # jitter too: numbers of a single float32 hardly feel half a rounding
    noisy = [rows(*(t + t * uniform(2.0**-24).double() for t in exact)) for _ in range(JITTERS)]
    wanted = standard("dq", rows(*exact), off_in_row_3(usual / 16), noisy, 3.0)
    assert wanted.judge(off_in_row_3(-usual)).faults == ()
    assert any("row 3" in fault for fault in wanted.judge(off_in_row_3(-32 * usual)).faults)


def test_a_fault_says_by_how_much():
    wanted, a, b = product_standard((4, 64), torch.float32)
    (fault,) = [f for f in wanted.judge(silu(a) * b * 1.5).faults if "of its norm" in f]
    measured = float(fault.split("error ")[1].split()[0])
    assert math.isclose(measured, 0.5, rel_tol=1e-3)


def test_an_oracle_in_half_precision_has_norms_that_do_not_overflow():
    exact = torch.full((8, 32), 96.0, dtype=torch.float16)  # the squares of a row are more than 65504
    wanted = standard("y", exact, exact, [exact.float()] * JITTERS, 2.0)
    assert wanted.judge(exact).faults == ()
    assert wanted.judge(torch.where(torch.arange(8)[:, None] == 7, exact * 1.1, exact)).faults
