"""Products of one row in Triton: in its interpreter and on a GPU, and what the compilers make of them.

Results lie inside a larger, poisoned tensor: an element left out and one written beside both fail.
"""

import random
import re

import pytest
import torch
from tests.ops.gemm.bounds import check, operands

from tilewright.ops.gemm.dense.args import MatmulArgs, plain_args
from tilewright.ops.gemm.operands import LAYOUTS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
POISON = -77.0
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
everywhere = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture
def engine():
    from tilewright.ops.gemm.kernels.triton import dense

    return dense


def run(engine, a, b, block_n=4, block_k=512, stages=1, *, bias=None, c=None, alpha=1.0, activation="", out=HALF):
    """The engine's result by a config of one row, after a look at what surrounds it."""
    batch, m, n = a.shape[0], a.shape[1], b.shape[2] // (2 if activation == "swiglu" else 1)
    around = torch.full((batch + 1, m + 3, n + 8), POISON, dtype=out, device=a.device)
    d = around[:batch, :m, :n]
    d.fill_(torch.nan)
    config = engine.Config(1, block_n, block_k, 4, stages, 1, False, 1)
    engine.gemm(d, MatmulArgs(a, b, bias, c, None, alpha, activation, out), config)
    made = d.clone()
    d.fill_(POISON)
    assert (around == POISON).all(), "written beside the result"
    return made


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_layout_even_and_ragged(engine, device, dtype, layout):
    for m, n, k in ((1, 72, 1024), (1, 37, 700), (1, 1, 1), (3, 18, 513)):
        a, b = operands(m, n, k, layout, dtype, device, lead=(1,))
        check(run(engine, a, b, out=dtype), a, b)


@everywhere
@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu", "swiglu"])
def test_every_epilogue(engine, device, activation):
    a, b = operands(1, 144, 640, "nt", HALF, device, lead=(1,))
    n = 72 if activation == "swiglu" else 144
    terms = {"bias": torch.randn(144, device=device), "c": torch.randn(1, 1, n, device=device), "alpha": 0.75}
    named = {**terms, "activation": activation or None}
    for out in (HALF, torch.float32):
        check(run(engine, a, b, **terms, activation=activation, out=out), a, b, **named)


@everywhere
def test_a_batch_and_magnitudes(engine, device):
    a, b = operands(2, 40, 1100, "nt", HALF, device, lead=(3,), magnitudes=20)
    check(run(engine, a, b, block_n=16, stages=3), a, b)


@everywhere
def test_float8(engine, device):
    a, b = operands(1, 64, 1024, "nt", torch.float32, device, lead=(1,))
    a8, b8 = a.to(FP8), (16 * b).to(FP8)
    check(run(engine, a8, b8, out=torch.float32), a8, b8)


@everywhere
def test_nan_reaches_its_column_alone(engine, device):
    a, b = operands(1, 24, 600, "nt", HALF, device, lead=(1,))
    b[0, 599, 23] = torch.nan
    made = run(engine, a, b)
    assert bool(made[0, 0, 23].isnan()) and int(made.isnan().sum()) == 1


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_candidates_keep_their_sums_in_registers(arch):
    """All of them on sm_90, which tunes them; a few elsewhere."""
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    from tilewright.ops.gemm.kernels.triton import dense, single_row

    configs = list(single_row.candidates())
    for config in configs if arch == "sm_90" else random.Random(0).sample(configs, 4):
        a, b = torch.empty(1, 1, 7168, dtype=HALF, device="meta"), torch.empty(1, 2112, 7168, dtype=HALF, device="meta")
        with target(arch) as compiled:
            dense.gemm(torch.empty(1, 1, 2112, dtype=HALF, device="meta"), plain_args(a, b.mT, HALF), config)
        (found,) = map(resources, compiled)
        assert (found.name, found.spilled) == ("row_kernel", 0), config
        if arch.startswith("sm_"):
            assert re.search(r"ld\.global\.\S*evict_first\S*\.v4|cp\.async\.cg", compiled[0].asm["ptx"]), (
                "16 bytes a load"
            )


@pytest.mark.parametrize(
    ("a_stride", "b_stride", "wide"),
    [
        ((1, 1), (1, 4), False),
        ((1, 1 << 18), (1, 4), False),
        ((1, 1 << 20), (1, 4), True),
        ((1, 1), (1 << 20, 1), True),
    ],
)
def test_offsets_inside_a_tile_fit_their_integers(engine, a_stride, b_stride, wide):
    """2048 steps of 2^20 elements are 2^31."""
    from tilewright.jit.collect import collect

    a = torch.empty_strided((1, 1, 4096), (0, *a_stride), dtype=HALF, device="meta")
    b = torch.empty_strided((1, 4096, 64), (0, *b_stride), dtype=HALF, device="meta")
    d = torch.empty(1, 1, 64, dtype=HALF, device="meta")
    with collect("sm_90") as collector:
        engine.gemm(d, plain_args(a, b, HALF), engine.Config(1, 4, 2048, 4, 1, 1, False, 1))
    (job,) = collector.jobs
    assert f"WIDE = {wide}" in job.key.flags
