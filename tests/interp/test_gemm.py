"""The dense Triton kernel beyond its ops' edge cases: descriptors, splits, strides, aliases, tile order, repeated bits.

Outputs lie inside a larger, poisoned tensor: an element left out and one written beside both fail.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright.ops.gemm.dense.args import MatmulArgs, MatmulBucket, plain_args

pytestmark = pytest.mark.interp

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
POISON = -77.0


@pytest.fixture
def engine():
    from tilewright.ops.gemm.kernels.triton import dense

    return dense


class Problem(NamedTuple):
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    c: Tensor | None = None
    scale: Tensor | None = None
    alpha: float = 1.0
    activation: str = ""

    def args(self, out_dtype):
        return MatmulArgs(*self, out_dtype)

    def exact(self) -> Tensor:
        """In float64."""
        from tilewright.ops.gemm.operands import apply_epilogue

        z = self.alpha * (self.a.double() @ self.b.double())
        if self.scale is not None:
            z = z * self.scale.double()
        return apply_epilogue(z, self.bias, self.c, self.activation, torch.float64)


def operands(batch, m, n, k, layout="nt", dtype=torch.bfloat16):
    a = torch.randn(batch, k, m).mT if layout[0] == "t" else torch.randn(batch, m, k)
    b = torch.randn(batch, k, n) if layout[1] == "n" else torch.randn(batch, n, k).mT
    return (a.to(dtype), b.to(dtype)) if dtype.itemsize == 1 else (a.to(dtype), (b * k**-0.5).to(dtype))


def whole(m, n, k, batch=1, dtype=torch.bfloat16, out_dtype=torch.bfloat16, activation=""):
    """A problem with every term of the epilogue."""
    a, b = operands(batch, m, n, k, dtype=dtype)
    n_out = n // 2 if activation == "swiglu" else n
    bias, c = torch.randn(n).to(out_dtype), torch.randn(batch, m, n_out).to(out_dtype)
    return Problem(a, b, bias, c, torch.tensor([0.7]), 1.5, activation)


def run(engine, problem, config, out_dtype=torch.bfloat16):
    """The engine's result, after a look at what surrounds it."""
    batch, m, n = problem.exact().shape
    around = torch.full((batch + 1, m + 3, n + 8), POISON, dtype=out_dtype)
    d = around[:batch, :m, :n]
    d.fill_(torch.nan)
    engine.gemm(d, problem.args(out_dtype), config)
    made = d.clone()
    d.fill_(POISON)
    assert (around == POISON).all(), "written beside the output"
    return made


def check(made: Tensor, problem: Problem) -> None:
    """Each element: one rounding of the exact result, and what a sum in float32 may lose."""
    exact = problem.exact()
    bound = ROUNDING[made.dtype] * exact.abs() + 2e-5 * (1 + exact.square().mean().sqrt())
    assert ((made.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_a_batch_of_ragged_products_in_every_layout(engine, layout, descriptors):
    problem = Problem(*operands(3, 40, 72, 88, layout))
    check(run(engine, problem, engine.Config(16, 32, 32, 4, 3, 2, descriptors, 1)), problem)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_a_descriptor_config_runs_on_what_no_descriptor_can_express(engine, layout):
    """Odd strides, and a batch that is one matrix repeated."""
    config = engine.Config(16, 32, 32, 4, 3, 2, True, 1)
    odd = Problem(*operands(1, 37, 45, 51, layout))
    check(run(engine, odd, config), odd)
    a, b = operands(1, 24, 40, 32, layout)
    repeated = Problem(a.expand(3, -1, -1), b.expand(3, -1, -1))
    check(run(engine, repeated, config), repeated)


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize(
    ("m", "k", "config"),
    [
        pytest.param(24, 64, (16, 32, 32, 4, 3, 2, True, 1), id="one_part"),
        pytest.param(24, 64, (16, 256, 32, 4, 3, 2, True, 1), id="four_parts_of_columns"),
        pytest.param(5, 5 * 32 + 8, (16, 32, 32, 4, 3, 2, True, 4), id="six_blocks_in_three_splits"),
    ],
)
def test_the_whole_epilogue(engine, activation, m, k, config):
    problem = whole(m, 144, k, batch=2, activation=activation)
    check(run(engine, problem, engine.Config(*config)), problem)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_dtypes(engine, dtype, out_dtype):
    problem = whole(20, 48, 160, dtype=dtype, out_dtype=out_dtype)
    check(run(engine, problem, engine.Config(16, 32, 64, 4, 3, 2, True, 1), out_dtype), problem)


@pytest.mark.parametrize("splits", [1, 2])
def test_c_may_be_the_output(engine, splits):
    problem = whole(20, 48, 128)
    d = problem.c.clone()
    engine.gemm(d, problem._replace(c=d).args(d.dtype), engine.Config(32, 32, 32, 4, 3, 2, True, splits))
    check(d, problem)


def test_strided_bias_and_c(engine):
    problem = whole(24, 48, 64)
    bias = torch.randn(96).bfloat16()[::2]
    odd_rows, even_rows = (torch.randn(1, 24, width).bfloat16()[..., -48:] for width in (51, 56))
    columns = torch.randn(1, 48, 24).bfloat16().mT
    for c in (odd_rows, even_rows, columns, columns[:, :1].expand(1, 24, 48)):
        strided = problem._replace(bias=bias, c=c)
        check(run(engine, strided, engine.Config(16, 32, 32, 4, 3, 2, True, 1)), strided)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 64, 40), (33, 1, 64), (9, 40, 1)])
def test_the_largest_tile_on_the_smallest_problems(engine, m, n, k):
    """Batch invariance asks for one configuration whatever M is."""
    for descriptors in (True, False):
        problem = Problem(*operands(1, m, n, k))
        check(run(engine, problem, engine.Config(128, 256, 64, 8, 4, 8, descriptors, 1)), problem)


def test_a_row_has_the_same_bits_alone_and_among_others(engine):
    problem = whole(40, 64, 96)
    config = engine.configure(MatmulBucket(4096, 64, 96, 0, 1, 16, 0), torch.bfloat16)
    together = run(engine, problem, config)
    for row in (0, 17, 39):
        alone = problem._replace(a=problem.a[:, row : row + 1], c=problem.c[:, row : row + 1])
        assert torch.equal(run(engine, alone, config), together[:, row : row + 1])


@pytest.mark.parametrize("group_m", [1, 2, 8])
def test_any_number_of_programs_and_any_order_of_tiles_gives_the_same_bits(engine, group_m, monkeypatch):
    problem = whole(72, 96, 64, batch=2)
    expected = run(engine, problem, engine.Config(16, 32, 32, 4, 3, 4, True, 1))
    for processors in (1, 7, 1000):
        monkeypatch.setattr(engine, "usable_sms", lambda _, n=processors: n)
        assert torch.equal(run(engine, problem, engine.Config(16, 32, 32, 4, 3, group_m, True, 1)), expected)
    check(expected, problem)


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_splits_are_added_in_one_order(engine, splits):
    """Partial products, summed by torch in the same order, give the same bits."""
    a, b = operands(1, 8, 32, 256)
    d = torch.empty(1, 8, 32)
    engine.gemm(d, plain_args(a, b, d.dtype), engine.Config(16, 32, 32, 4, 3, 2, True, splits))
    expected = torch.zeros(1, 8, 32)
    step = 32 * -(-8 // splits)
    for start in range(0, 256, step):
        part = torch.empty(1, 8, 32)
        operand = (a[..., start : start + step], b[:, start : start + step])
        engine.gemm(part, plain_args(*operand, part.dtype), engine.Config(16, 32, 32, 4, 3, 2, True, 1))
        expected += part
    assert torch.equal(d, expected)


def test_offsets_of_64_bits_inside_a_tile(engine):
    """Rows so far apart that a tile of 512 of them would span more than 2^31 elements."""
    far = 2**22 + 16
    store = torch.zeros(2 * far + 64, dtype=torch.bfloat16)
    a = store.as_strided((1, 3, 48), (3 * far, far, 1))
    a.copy_(torch.randn(1, 3, 48))
    problem = Problem(a, operands(1, 3, 40, 48)[1])
    check(run(engine, problem, engine.Config(16, 32, 32, 4, 3, 2, False, 1)), problem)


def test_nan_and_infinity_reach_their_own_rows_and_columns_only(engine):
    problem = whole(20, 48, 64)
    problem.a[0, 3, 5], problem.b[0, 7, 11] = torch.nan, torch.inf
    made = run(engine, problem, engine.Config(16, 32, 32, 4, 3, 2, True, 1))
    assert torch.equal(made.isnan(), problem.exact().isnan())
    assert torch.equal(made.isfinite(), problem.exact().isfinite())
