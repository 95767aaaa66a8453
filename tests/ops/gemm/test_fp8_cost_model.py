"""The tile that the engine for scaled e4m3 operands takes."""

import logging
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright import settings
from tilewright.dispatch.bucket import INVARIANT_ROWS
from tilewright.log import forget_logged
from tilewright.ops.gemm.engines import few_rows_cuda, fp8_cuda, hopper_fp8_cuda
from tilewright.ops.gemm.engines.fp8_cost_model import Problem, Tile, predict, rank, scratch
from tilewright.ops.gemm.scaled_matmul.workloads import DEEPSEEK_V3

FP8 = torch.float8_e4m3fn
TOKEN_BLOCK, TOKEN_TOKEN = 2, 3


def bucket(m, n, k, out_bits=16, epilogue=0, scaling=TOKEN_BLOCK):
    return m, n, k, 0, 1, out_bits, epilogue, scaling


def chosen(m, n, k, **options):
    """(config, prediction) on 132 SMs."""
    config = fp8_cuda.configure(bucket(m, n, k, **options), FP8)
    tile = Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n)
    return config, predict(Problem(m, n, k, scaling=options.get("scaling", TOKEN_BLOCK)), tile)


@pytest.mark.parametrize(("n", "k"), DEEPSEEK_V3)
def test_4096_rows_fill_their_waves(n, k):
    config, prediction = chosen(4096, n, k)
    assert prediction.busy > 0.85
    assert prediction.tiles >= ceil(4096 / config.block_m) * ceil(n / config.block_n)


def test_few_columns_are_one_wave():
    config, prediction = chosen(4096, 576, 7168)
    assert (config.block_m, config.block_n) == (192, 96), "22 x 6 tiles"
    assert prediction.waves == 1


MEASURED = {  # us of tiles at the H200's power limit: the three or four fastest of those without a cluster
    (4096, 4096, 7168): {(128, 128): 211.0, (128, 256): 220.0, (192, 128): 263.9, (128, 192): 269.8},
    (4096, 7168, 16384): {(128, 128): 818.4, (128, 256): 868.2, (192, 128): 967.8, (128, 192): 1030.0},
    (8192, 7168, 2048): {(128, 128): 224.6, (128, 256): 229.8, (192, 128): 247.4, (128, 192): 253.0},
    (4096, 24576, 1536): {(128, 128): 298.4, (128, 256): 300.9, (192, 128): 319.7, (128, 192): 333.9},
    (4096, 2112, 7168): {(192, 128): 118.4, (128, 192): 124.3, (128, 128): 126.3, (128, 256): 154.8},
    (4096, 32768, 512): {(192, 128): 159.0, (128, 128): 166.3, (128, 256): 166.7, (128, 192): 176.4},
}
POWER_TO_SPARE = (4096, 2112, 7168)
BY_TOKEN = {(128, 256): 320.0, (192, 128): 326.4, (128, 128): 327.8, (128, 192): 338.0}  # 7168x4096x4096, into float32


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_choice_is_the_fastest_measured_and_its_time_right(shape):
    config, prediction = chosen(*shape)
    measured = MEASURED[shape]
    assert measured[config.block_m, config.block_n] <= 1.02 * min(measured.values())
    error = prediction.us / measured[config.block_m, config.block_n] - 1
    assert 0 < error < 0.08 if shape == POWER_TO_SPARE else abs(error) < 0.02


def test_the_choice_for_scales_of_tokens_is_the_fastest_measured():
    config = fp8_cuda.configure(bucket(7168, 4096, 4096, 32, scaling=TOKEN_TOKEN), FP8)
    assert BY_TOKEN[config.block_m, config.block_n] == min(BY_TOKEN.values())
    prediction = predict(Problem(7168, 4096, 4096, 4, scaling=TOKEN_TOKEN), Tile(config.block_m, config.block_n))
    assert prediction.us == pytest.approx(320.0, rel=0.04)


def test_a_second_scratch_goes_where_registers_allow():
    """Sums and scratch of a thread are 192 accumulators at most, 128 where three warpgroups share the registers."""
    for tile in fp8_cuda.TILES:
        passes = 2 if tile.block_n > 192 else 1
        accumulators = (passes + scratch(tile)) * tile.block_n // passes // 2
        assert accumulators <= (128 if tile.block_m == 192 else 192)
        assert scratch(tile) == 1 or passes == 1
    assert scratch(Tile(128, 128)) == scratch(Tile(64, 128)) == 2
    assert scratch(Tile(192, 128)) == scratch(Tile(128, 192)) == scratch(Tile(128, 256)) == 1


def test_scales_of_columns_cost_more_than_scales_of_blocks():
    tile = Tile(128, 256)
    blocks, tokens = (predict(Problem(4096, 4096, 4096, scaling=s), tile) for s in (TOKEN_BLOCK, TOKEN_TOKEN))
    assert tokens.tensor_us > blocks.tensor_us


def test_a_cluster_halves_what_the_l2_sends():
    problem = Problem(4096, 4096, 7168)
    alone, pair = predict(problem, Tile(192, 128)), predict(problem, Tile(192, 128, 1, 2))
    assert pair.l2_us == pytest.approx(alone.l2_us * (96 + 128) / (192 + 128))


def test_predictions_that_are_alike_give_the_larger_tile():
    tiles = [Tile(128, 128), Tile(128, 256, 2, 1), Tile(128, 256)]
    assert rank(Problem(64, 64, 4 << 20), tiles)[0][0] == Tile(128, 128), "half the work"
    tiles = [Tile(128, 192, 2, 1), Tile(128, 192), Tile(192, 128)]
    assert rank(Problem(768, 768, 8192), tiles)[0][0] == Tile(192, 128)


SIZES = st.one_of(st.integers(1, 300), st.sampled_from((512, 1024, 2048, 8064)))


@given(
    m=st.integers(0, 14).map(lambda i: 1 << i),
    n=SIZES.map(lambda n: 16 * n),
    k=SIZES.map(lambda k: 16 * k),
    out_bits=st.sampled_from((8, 16, 32)),
    epilogue=st.sampled_from((0, 1, 2)),
    scaling=st.integers(0, 3),
)
def test_every_choice_can_be_compiled_and_launched(m, n, k, out_bits, epilogue, scaling):
    where = bucket(m, n, k, out_bits, epilogue, scaling)
    config = fp8_cuda.configure(where, FP8)
    assert config in (fp8_cuda.CONFIGS_FP8 if out_bits == 8 else fp8_cuda.CONFIGS)
    for each in (config, *fp8_cuda.candidates(where, FP8)):
        check_legal(each, out_bits, epilogue == 1, scaling)


def check_legal(config, out_bits, gated, scaling):
    """The static assertions of sm90_fp8_gemm.cuh."""
    passes = 2 if config.block_n > 192 else 1
    columns = config.block_n // passes
    assert config.block_m in (64, 128, 192)
    assert (passes + config.scratch) * columns <= (2 if config.block_m == 192 else 3) * 128
    assert config.scratch == 1 or passes == 1
    assert columns <= 128 or 128 % (columns - 128) == 0 or columns % (columns - 128) == 0, "two blocks of scales"
    assert not gated or config.block_n % 32 == 0
    assert out_bits > 8 or columns == 128
    assert out_bits > 8 or not gated or passes == 2
    assert config.cluster_m == config.cluster_n == 1
    assert fp8_cuda._shared_bytes(config, scaling) <= 232448 - 1024


def test_few_rows_go_to_their_own_engine():
    few = hopper_fp8_cuda.configure(bucket(16, 4096, 7168), FP8)
    assert few.kernel == "few_rows"
    assert few in hopper_fp8_cuda.CONFIGS
    many = hopper_fp8_cuda.configure(bucket(128, 4096, 7168), FP8)
    assert many.kernel == "dense"
    assert many in hopper_fp8_cuda.CONFIGS
    assert hopper_fp8_cuda.configure(bucket(INVARIANT_ROWS, 4096, 7168), FP8).kernel == "dense"
    tried = hopper_fp8_cuda.candidates(bucket(64, 4096, 7168), FP8)
    assert {config.kernel for config in tried} == {"few_rows", "dense"}


@pytest.mark.parametrize("kernel", ["few_rows", "dense"])
def test_a_config_reaches_the_engine_that_it_names(kernel, monkeypatch):
    calls = []
    monkeypatch.setattr(few_rows_cuda, "scaled", lambda *args: calls.append(("few_rows", args)))
    monkeypatch.setattr(fp8_cuda, "gemm", lambda *args: calls.append(("dense", args)))
    config = hopper_fp8_cuda.configure(bucket(16 if kernel == "few_rows" else 512, 4096, 7168), FP8)
    given = tuple(range(9))
    hopper_fp8_cuda.gemm(*given, config)
    ((name, args),) = calls
    assert name == kernel
    assert args[:9] == given
    assert args[9] in (few_rows_cuda.CONFIGS_SCALED if kernel == "few_rows" else fp8_cuda.CONFIGS)


def test_the_prediction_is_printed(monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_PRINT_CONFIGS", "1")
    settings.reload()
    forget_logged()
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        fp8_cuda.configure(bucket(4096, 592, 7168), FP8)
    (record,) = caplog.records
    assert "us predicted" in record.getMessage()
