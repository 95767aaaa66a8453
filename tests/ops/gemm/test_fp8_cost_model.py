"""The tile that the kernel for scaled e4m3 operands takes."""

import logging
from math import ceil, inf
from statistics import geometric_mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright import settings
from tilewright.dispatch import implementations
from tilewright.dispatch.bucket import INVARIANT_ROWS
from tilewright.log import forget_logged
from tilewright.ops.gemm.dense.args import SEPARATE
from tilewright.ops.gemm.kernels.sm90 import few_rows_scaled, fp8
from tilewright.ops.gemm.kernels.sm90.fp8_cost_model import Problem, Tile, predict, rank
from tilewright.ops.gemm.scaled.args import ScaledBucket
from tilewright.ops.gemm.scaled.workloads import DEEPSEEK_V3

FP8 = torch.float8_e4m3fn
TOKEN_BLOCK, TOKEN_TOKEN = 2, 3


def bucket(m, n, k, out_bits=16, epilogue=0, scaling=TOKEN_BLOCK):
    return ScaledBucket(m, n, k, 0, 1, out_bits, epilogue, scaling)


def chosen(m, n, k, **options):
    """(config, prediction) on 132 SMs."""
    config = fp8.configure(bucket(m, n, k, **options), FP8)
    problem = Problem(m, n, k, options.get("out_bits", 16) // 8, scaling=options.get("scaling", TOKEN_BLOCK))
    return config, predict(problem, Tile(config.block_m, config.block_n))


@pytest.mark.parametrize(("n", "k"), DEEPSEEK_V3)
def test_4096_rows_fill_their_waves(n, k):
    config, prediction = chosen(4096, n, k)
    assert prediction.busy > 0.85
    assert prediction.tiles >= ceil(4096 / config.block_m) * ceil(n / config.block_n)


def test_few_columns_are_one_wave():
    config, prediction = chosen(4096, 576, 7168)
    assert (config.block_m, config.block_n) == (192, 96), "22 x 6 tiles"
    assert prediction.waves == 1


MEASURED = {  # M, N, K, scaling: us of the fastest tiles, launch after launch at the H200's power limit
    (4096, 4096, 7168, 2): {(256, 128): 198.0, (128, 128): 205.8, (192, 128): 215.0},
    (4096, 7168, 16384, 2): {(256, 128): 792.8, (128, 128): 836.0, (192, 128): 842.9},
    (4096, 24576, 1536, 2): {(192, 128): 264.0, (128, 192): 273.5, (256, 128): 284.5},
    (4096, 2112, 7168, 2): {(192, 128): 99.3, (128, 192): 101.7, (192, 96): 114.3},
    (4096, 7168, 2048, 2): {(256, 128): 96.8, (192, 128): 106.0, (128, 128): 107.4},
    (4096, 32768, 512, 2): {(192, 128): 149.2, (256, 128): 149.8, (128, 192): 152.8},
    (4096, 576, 7168, 2): {(192, 96): 30.0, (128, 192): 32.5, (192, 128): 32.6},
    (8192, 4096, 7168, 2): {(192, 128): 396.3, (256, 128): 404.5, (128, 192): 412.2},
    (8192, 7168, 16384, 2): {(192, 128): 1585.9, (256, 128): 1618.6, (128, 192): 1632.1},
    (8192, 24576, 1536, 2): {(192, 128): 530.3, (128, 192): 544.5, (256, 128): 553.6},
    (8192, 2112, 7168, 2): {(192, 128): 208.6, (128, 192): 219.8, (128, 128): 226.8},
    (8192, 7168, 2048, 2): {(192, 128): 204.7, (128, 192): 210.9, (256, 128): 211.9},
    (8192, 32768, 512, 2): {(256, 128): 294.0, (192, 128): 295.5, (128, 192): 306.5},
    (8192, 576, 7168, 2): {(192, 96): 59.5, (192, 128): 64.9, (128, 192): 65.3},
}


def measured(shape):
    """The chosen tile's time as measured, or infinity if others were faster; and as predicted."""
    m, n, k, scaling = shape
    config, prediction = chosen(m, n, k, scaling=scaling)
    return MEASURED[shape].get((config.block_m, config.block_n), inf), prediction.us


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_choice_is_among_the_fastest_measured_and_its_time_near(shape):
    us, predicted = measured(shape)
    assert us * 0.95 <= min(MEASURED[shape].values())
    assert predicted == pytest.approx(us, rel=0.1)


MEASURED_BY_TOKEN = {  # M, N, K of weight gradients in float32: us of one run on an H100
    (7168, 4096, 8192): {(256, 112): 538.5, (256, 128): 560.9, (256, 96): 580.0, (192, 128): 593.7},
    (7168, 4096, 4096): {(256, 112): 266.9, (256, 128): 280.5, (256, 96): 290.8, (192, 128): 320.4},
    (512, 32768, 4096): {(256, 112): 175.5, (256, 128): 168.3, (256, 96): 181.8, (192, 128): 184.8},
    (1536, 24576, 4096): {(256, 112): 356.8, (256, 128): 381.1, (256, 96): 372.4, (192, 128): 372.0},
    (2048, 7168, 4096): {(256, 112): 136.0, (256, 128): 160.0, (256, 96): 145.7, (192, 128): 151.2},
}


@pytest.mark.parametrize("shape", MEASURED_BY_TOKEN, ids=str)
def test_with_scales_of_columns_the_choice_is_the_fastest_measured(shape):
    times = MEASURED_BY_TOKEN[shape]
    config, _ = chosen(*shape, out_bits=32, scaling=TOKEN_TOKEN)
    assert times[config.block_m, config.block_n] == min(times.values())


MEASURED_ADDED = {  # the same, added to D
    (7168, 2112, 4096): {(192, 128): 156.9, (256, 112): 185.6, (256, 128): 172.8},
    (1536, 24576, 4096): {(192, 128): 368.1, (256, 112): 389.1, (256, 128): 390.2},
    (512, 32768, 4096): {(192, 128): 194.2, (256, 112): 199.3, (256, 128): 180.6},
    (16384, 7168, 4096): {(192, 128): 1076.5, (256, 112): 1131.5, (256, 128): 1165.5},
    (7168, 4096, 4096): {(192, 128): 313.9, (256, 112): 306.8, (256, 128): 311.6},
    (2048, 7168, 4096): {(192, 128): 161.2, (256, 112): 163.9, (256, 128): 177.2},
    (7168, 2112, 8192): {(192, 128): 284.1, (256, 112): 332.2, (256, 128): 312.6},
    (512, 32768, 8192): {(192, 128): 346.0, (256, 112): 342.6, (256, 128): 335.0},
    (7168, 4096, 8192): {(192, 128): 567.6, (256, 112): 542.8, (256, 128): 556.8},
    (2048, 7168, 8192): {(192, 128): 280.4, (256, 112): 268.0, (256, 128): 313.5},
}


@pytest.mark.parametrize("shape", MEASURED_ADDED, ids=str)
def test_what_is_added_has_a_tile_near_the_fastest(shape):
    times = MEASURED_ADDED[shape]
    config, _ = chosen(*shape, out_bits=32, epilogue=SEPARATE, scaling=TOKEN_TOKEN)
    assert times[config.block_m, config.block_n] < 1.05 * min(times.values())


def test_the_choice_is_as_fast_as_the_fastest_almost_everywhere():
    lost = [measured(shape)[0] / min(times.values()) for shape, times in MEASURED.items()]
    assert geometric_mean(lost) < 1 / 0.985


@pytest.mark.parametrize(("m", "n", "k"), [(128, 2112, 7168), (128, 576, 7168), (256, 7168, 2048), (512, 4096, 7168)])
def test_few_rows_take_tiles_for_most_multiprocessors_in_one_wave(m, n, k):
    config, prediction = chosen(m, n, k)
    assert prediction.waves == 1
    assert prediction.tiles * config.split > 132 / 2


def test_scales_of_columns_cost_more_than_scales_of_blocks():
    tile = Tile(128, 128)
    blocks, tokens = (predict(Problem(4096, 4096, 4096, scaling=s), tile) for s in (TOKEN_BLOCK, TOKEN_TOKEN))
    assert tokens.tensor_us > blocks.tensor_us


def test_multiprocessors_without_a_tile_leave_power_to_the_others():
    full, half = (predict(Problem(256 * m, 128 * 66, 7168), Tile(256, 128)) for m in (2, 1))
    assert half.waves == full.waves == 1
    assert full.us / 2 < half.us < full.us


def test_equal_predictions_give_the_larger_tile():
    stored = Problem(4096, 4096, 16, out_bytes=1 << 20)  # what counts is the result's way to DRAM
    assert rank(stored, [Tile(64, 128), Tile(256, 128), Tile(128, 128)])[0][0] == Tile(256, 128)


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
    config = fp8.configure(where, FP8)
    assert config in (fp8.CONFIGS_FP8 if out_bits == 8 else fp8.CONFIGS)
    for each in (config, *fp8.candidates(where, FP8)):
        check_legal(each, out_bits, epilogue == 1, scaling)


def check_legal(config, out_bits, gated, scaling):
    """The static assertions of fp8.cuh."""
    passes, waves = (2 if config.block_n > 192 else 1), (2 if config.block_m > 192 else 1)
    columns = config.block_n // passes
    assert config.block_m in (64, 128, 192, 256)
    assert (passes * waves + 1) * columns <= (2 if config.block_m == 192 else 3) * 128
    assert columns <= 192, "three blocks of scales"
    assert not gated or config.block_n % 32 == 0
    assert out_bits > 8 or columns == 128
    assert out_bits > 8 or not gated or passes == 2
    assert fp8.shared_bytes(config, scaling) <= 232448 - 1024
    assert config.cluster_m * config.cluster_n in (1, 2)
    assert config.cluster_m * config.cluster_n * config.split <= 8
    owned = -(-config.block_n // 8 // config.split)
    parcels = config.split * owned * 8 * config.block_m * 4
    assert config.split == 1 or parcels <= config.stages * (config.block_m + config.block_n) * 128, (
        "they lie in the ring"
    )
    assert config.split == 1 or (waves == 1 and out_bits > 8)


def test_few_rows_go_to_their_own_kernel():
    backend = implementations("scaled_matmul", "fwd")["cuda"]
    assert [kernel.kernel for kernel in backend.kernels] == ["sm90.few_rows_scaled", "sm90.fp8"]
    few, many = (backend.configure(bucket(m, 4096, 7168), FP8) for m in (16, 128))
    assert type(few) is few_rows_scaled.Config and few in few_rows_scaled.CONFIGS
    assert type(many) is fp8.Config and many in fp8.CONFIGS
    assert type(backend.configure(bucket(INVARIANT_ROWS, 4096, 7168), FP8)) is fp8.Config
    tried = backend.candidates(bucket(64, 4096, 7168), FP8)
    assert {type(config) for config in tried} == {few_rows_scaled.Config, fp8.Config}


def test_the_prediction_is_printed(monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_PRINT_CONFIGS", "1")
    settings.reload()
    forget_logged()
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        fp8.configure(bucket(4096, 592, 7168), FP8)
    (record,) = caplog.records
    assert "us predicted" in record.getMessage()
