"""The scaled Triton kernel: what it computes in Triton's interpreter, what the compilers make of it, what it chooses.

Results lie inside a larger, poisoned tensor: an element left out and one written beside both fail.
"""

import random

import pytest
import torch
from tests.ops.gemm.scaled_problems import FP8, OTHERS, PAIRS, operands

from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulArgs, plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import GRANULARITIES
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
POISON = -77.0
interp = pytest.mark.interp


@pytest.fixture
def engine():
    from tilewright.ops.gemm.kernels.triton import scaled

    return scaled


def config(engine, m, n, descriptors=True, splits=1, group_m=2):
    return engine.Config(m, n, 128, 4, 3, group_m, descriptors, splits)


def run(engine, problem, config, bias=None, c=None, alpha=1.0, activation="", out_dtype=torch.bfloat16):
    """The engine's result, after a look at what surrounds it."""
    batch, m, n = problem.a.shape[0], problem.a.shape[1], problem.b.shape[2] // (2 if activation == "swiglu" else 1)
    around = torch.full((batch + 1, m + 3, n + 8), POISON, dtype=out_dtype)
    d = around[:batch, :m, :n]
    d.fill_(torch.nan)
    engine.gemm(d, ScaledMatmulArgs(*problem, bias, c, alpha, activation, out_dtype), config)
    made = d.clone()
    d.fill_(POISON)
    assert (around == POISON).all(), "written beside the result"
    return made


def check(made, problem, *epilogue):
    """Each element: one rounding of the exact result, and what sums in float32 may lose of these terms."""
    exact = problem.exact(*epilogue)
    a, b = problem.dequantised()
    bound = ROUNDING[made.dtype] * exact.abs() + 2e-5 * (1 + (a.abs() @ b.abs()).max())
    assert ((made.double() - exact).abs() <= bound).all()


@interp
@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_batch_of_ragged_products_in_every_scaling(engine, pair, descriptors):
    for m, n, k in ((40, 144, 272), (5, 200, 328)):
        problem = operands(m, n, k, pair, batch=(3,))
        check(run(engine, problem, config(engine, 16, 64, descriptors)), problem)


@interp
@pytest.mark.parametrize("pair", PAIRS)
def test_splits_are_added_in_one_order(engine, pair):
    """Nine blocks in four parts; the parts, computed alone and added by torch, give the same bits."""
    problem = operands(8, 136, 9 * 128 - 16, pair, batch=(1,))
    made = run(engine, problem, config(engine, 16, 64, splits=4), out_dtype=torch.float32)
    check(made, problem)
    total = torch.zeros(1, 8, 136)
    for first in range(0, 9, 3):
        k = slice(128 * first, 128 * (first + 3))
        blocks = slice(first, first + 3) if pair.startswith("token") else slice(None)
        part = problem._replace(a=problem.a[..., k], b=problem.b[:, k])
        part = part._replace(scale_a=part.scale_a[..., blocks], scale_b=part.scale_b[..., blocks])
        total += run(engine, part, config(engine, 16, 64), out_dtype=torch.float32)
    assert torch.equal(made, total)


@interp
@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_whole_epilogue(engine, activation, splits):
    problem = operands(24, 272, 400, batch=(2,))
    n_out = 136 if activation == "swiglu" else 272
    bias, c = torch.randn(272).bfloat16(), torch.randn(2, 24, n_out).bfloat16()
    epilogue = (bias, c, 0.7, activation)
    made = run(engine, problem, config(engine, 32, 128, splits=splits), *epilogue)
    check(made, problem, *epilogue)


@interp
def test_a_weight_gradient_adds_to_itself(engine):
    problem = operands(20, 136, 400, "token_token", batch=(1,))
    before = torch.randn(1, 20, 136)
    total = before.clone()
    engine.gemm(total, plain_scaled_args(*problem, total.dtype)._replace(c=total), config(engine, 32, 64))
    check(total, problem, None, before)


@interp
def test_bytes_where_a_gpu_has_no_e4m3(engine, monkeypatch):
    """Every number there is, decoded and multiplied as float16, gives the same bits."""
    problem = operands(16, 64, 272, batch=(1,))
    problem.a.view(torch.uint8)[0, :, :256] = torch.arange(256, dtype=torch.uint8)
    expected = run(engine, problem, config(engine, 16, 64), out_dtype=torch.float32)
    assert expected.isnan().all(), "0x7f and 0xff are NaN"
    problem.a.view(torch.uint8)[0, :, [127, 255]] = 1
    expected = run(engine, problem, config(engine, 16, 64), out_dtype=torch.float32)
    monkeypatch.setattr(engine, "as_stored", lambda t: t.view(torch.uint8))
    assert torch.equal(run(engine, problem, config(engine, 16, 64), out_dtype=torch.float32), expected)
    check(expected, problem)


@interp
def test_a_row_has_the_same_bits_alone_and_among_others(engine):
    problem = operands(40, 144, 272, batch=(1,))
    chosen = engine.configure(ScaledBucket(4096, 144, 272, 0, 1, 16, 0, 2), FP8)
    together = run(engine, problem, chosen)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        alone = problem._replace(a=problem.a[:, one], scale_a=problem.scale_a[:, one])
        assert torch.equal(run(engine, alone, chosen), together[:, one])


@interp
def test_any_number_of_programs_and_any_order_of_tiles_gives_the_same_bits(engine, monkeypatch):
    problem = operands(72, 272, 272, batch=(2,))
    expected = run(engine, problem, config(engine, 16, 64))
    for processors, group_m in ((1, 1), (7, 8), (1000, 2)):
        monkeypatch.setattr(engine, "usable_sms", lambda _, n=processors: n)
        assert torch.equal(run(engine, problem, config(engine, 16, 64, group_m=group_m)), expected)


@interp
@pytest.mark.parametrize(("m", "n"), [(20, 272), (1, 128), (33, 7)])
def test_a_result_in_float8_is_the_cast_of_the_float32_one(engine, m, n):
    problem = operands(m, n, 272, batch=(2,))
    q = torch.full((2, m, n), torch.nan).to(FP8)
    of_q = TOKEN.empty(m, n, "cpu", 2).fill_(torch.nan)
    engine.gemm_fp8(q, of_q, plain_scaled_args(*problem, torch.float32), config(engine, 16, 64))
    expected = cast(run(engine, problem, config(engine, 16, 64), out_dtype=torch.float32), TOKEN)
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(of_q, expected[1])


# What it chooses.


def buckets(count):
    rng = random.Random(0)
    for _ in range(count):
        m, n, k = 1 << rng.randrange(15), rng.randrange(2, 40000), rng.randrange(1, 20000)
        bits = rng.choice((8, 16, 32))
        yield ScaledBucket(m, n, k, rng.randrange(4), rng.randrange(2), bits, rng.randrange(3), rng.randrange(4))


def test_whatever_configure_returns_is_listed(engine):
    for bucket in buckets(300):
        chosen = engine.configure(bucket, FP8)
        assert chosen in engine.CONFIGS
        assert bucket.aligned or not chosen.descriptors


def test_the_search_space_is_small_and_legal(engine):
    for bucket in buckets(60):
        space = engine.candidates(bucket, FP8)
        assert 0 < len(space) <= 64
        assert len(set(space)) == len(space)
        for each in space:
            assert 128 % each.block_n == 0, "a tile lies in one block of columns"
            assert min(each.block_m, each.block_n) >= 16
            assert bucket.aligned or not each.descriptors
            assert each.splits == 1 or 2 * each.splits * 128 <= bucket.K


def test_few_rows_split_k_and_batch_invariant_calls_never_do(engine):
    assert engine.configure(ScaledBucket(16, 2112, 7168, 0, 1, 16, 0, 2), FP8).splits == 4
    assert engine.configure(ScaledBucket(16, 32768, 512, 0, 1, 16, 0, 2), FP8).splits == 1
    assert engine.configure(ScaledBucket(4096, 576, 7168, 0, 1, 16, 0, 2), FP8).splits == 1


@pytest.mark.parametrize("pair", OTHERS)
def test_pairs_that_it_lacks_are_refused_in_words(engine, pair):
    problem = operands(140, 136, 272, pair)
    assert "by tensor, by row and column, 1x128 by 128x128, or 1x128 by 1x128; got" in engine.why_not(
        plain_scaled_args(*problem, torch.bfloat16)
    )


# Compiled for GPUs that are not here.

PROBLEMS = {
    "token_block": {},
    "token_token_accumulates": {"pair": "token_token", "c": True, "out_dtype": torch.float32},
    "row_bias_gelu": {"pair": "row", "bias": True, "activation": "gelu"},
    "tensor_swiglu": {"pair": "tensor", "activation": "swiglu"},
    "everything": {"bias": True, "c": True, "activation": "silu", "out_dtype": torch.float16},
    "odd": {"n": 2111, "k": 4095},
    "few_rows_in_splits": {"m": 16, "n": 2112, "k": 7168, "bias": True, "c": True},
}
# Elsewhere than on sm_90, one of each shape of the kernel; tests/compile compiles every configuration for all targets
ELSEWHERE = ("token_block", "everything", "odd", "few_rows_in_splits")
COMPILED = [(name, arch) for name in PROBLEMS for arch in ARCHITECTURES if arch == "sm_90" or name in ELSEWHERE]


def launch(engine, m=4096, n=4096, k=4096, pair="token_block", activation="", out_dtype=torch.bfloat16, **terms):
    def meta(*shape, of):
        return torch.empty(*shape, dtype=of, device="meta")

    of_a, of_b = (GRANULARITIES[name] for name in PAIRS[pair])
    shape = (1, m, n // 2 if activation == "swiglu" else n)
    bias = meta(n, of=out_dtype) if terms.get("bias") else None
    c = meta(*shape, of=out_dtype) if terms.get("c") else None
    bucket = ScaledBucket(m, n, k, 0, int(n % 16 == 0), 8 * out_dtype.itemsize, int(activation == "swiglu"), 0)
    of = (of_a.empty(m, k, "meta", 1), of_b.empty(n, k, "meta", 1))
    matrices = (meta(1, m, k, of=FP8), meta(1, n, k, of=FP8).mT)
    d = meta(*shape, of=out_dtype)
    args = ScaledMatmulArgs(*matrices, *of, bias, c, 1.5, activation, out_dtype)
    engine.gemm(d, args, engine.configure(bucket, FP8))


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_compiles_without_spills_onto_the_matrix_units(engine, name, arch):
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    with target(arch) as compiled:
        launch(engine, **PROBLEMS[name])
    found = [resources(kernel) for kernel in compiled]
    few = name == "few_rows_in_splits"
    assert [r.name for r in found] == ["scaled_gemm_kernel", "reduce_kernel"][: 1 + few]
    assert [r.spilled for r in found] == [0] * len(found)
    assert found[0].matrix_instructions
    if arch == "sm_90" and not few:
        assert any("wgmma" in i and "k32" in i for i in found[0].matrix_instructions), "eight bits an element"
        bulk = "cp.async.bulk.tensor" in compiled[0].asm["ptx"]
        assert bulk == (name != "odd"), "descriptors are for aligned operands"
