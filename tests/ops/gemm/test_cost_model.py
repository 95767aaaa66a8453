"""The tile that the dense kernel for Hopper takes: full waves, shared memory that fits, only what can be compiled."""

import logging
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright import settings
from tilewright.dispatch import implementations
from tilewright.dispatch.bucket import INVARIANT_ROWS
from tilewright.log import forget_logged
from tilewright.ops.gemm.dense.args import BmmBucket, MatmulBucket
from tilewright.ops.gemm.dense.workloads import DEEPSEEK_V3, LLAMA_8B
from tilewright.ops.gemm.kernels.sm90 import dense, few_rows
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile, group_m, predict, rank, shared_pressure

NT, NN, TN, TT = range(4)
BF16 = torch.bfloat16
SHARED_LIMIT = 232448  # bytes a block may have on sm_90


def bucket(m, n, k, layout=NT, out_bits=16, gated=0):
    return MatmulBucket(m, n, k, layout, 1, out_bits, gated)


def chosen(m, n, k, **options):
    """(config, prediction) on 132 SMs."""
    config = dense.configure(bucket(m, n, k, **options), BF16)
    tile = Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n)
    return config, predict(Problem(m, n, k, mn_major_b=options.get("layout") in (NN, TN)), tile)


def test_576_columns_fill_the_machine_in_one_wave():
    config, prediction = chosen(4096, 576, 7168)
    assert (config.block_m, config.block_n) == (128, 144)
    assert (prediction.tiles, prediction.waves) == (128, 1)
    assert prediction.busy >= 0.95


def test_2112_columns_leave_no_wave_half_empty():
    config, prediction = chosen(4096, 2112, 7168)
    assert 2112 % config.block_n == 0
    assert prediction.busy >= 0.95


@pytest.mark.parametrize(("n", "k"), [*DEEPSEEK_V3, *LLAMA_8B.values(), (4096, 4096), (8192, 8192)])
def test_large_products_waste_little(n, k):
    _, prediction = chosen(4096, n, k)
    assert prediction.busy >= 0.95
    assert prediction.tensor_us > prediction.l2_us


def test_large_tiles_where_all_fill_the_machine():
    assert chosen(8192, 8192, 8192)[0][:2] == (128, 256)


def test_a_small_problem_takes_small_tiles():
    """1024x1024: 32 tiles of 128x256 would leave 100 SMs idle."""
    config, prediction = chosen(1024, 1024, 1024)
    assert prediction.tiles >= 100
    assert config.block_m * config.block_n <= 128 * 128


@pytest.mark.parametrize("sms", [78, 132, 148])
@pytest.mark.parametrize("tile", [Tile(128, 256), Tile(64, 32), Tile(128, 144, 2, 1), Tile(128, 144, 1, 2)], ids=str)
def test_waves_are_those_of_the_tile_scheduler(tile, sms):
    m, n, batch = 1000, 2112, 3
    work = [0] * (sms // (tile.cluster_m * tile.cluster_n))
    for unit in range(
        ceil(ceil(m / tile.block_m) / tile.cluster_m) * ceil(ceil(n / tile.block_n) / tile.cluster_n) * batch
    ):
        work[unit % len(work)] += 1
    assert predict(Problem(m, n, 512, batch=batch, sms=sms), tile).waves == max(work)


def test_what_a_tile_costs():
    tile, problem = Tile(128, 256), Problem(4096, 4096, 4096)
    whole = predict(problem, tile)
    assert predict(problem._replace(k=8192), tile).tensor_us == pytest.approx(2 * whole.tensor_us)
    assert predict(problem._replace(k=4090), tile).tensor_us == whole.tensor_us  # K is read in steps of 64
    assert predict(problem, Tile(128, 256, 2, 1)).l2_us < whole.l2_us
    assert predict(problem._replace(out_bytes=4), tile).epilogue_us > whole.epilogue_us
    assert predict(problem._replace(gated=True), tile).epilogue_us < whole.epilogue_us
    assert predict(problem._replace(mn_major_b=True), Tile(128, 144)).l2_us > predict(problem, Tile(128, 144)).l2_us


def test_small_tiles_press_on_shared_memory():
    """The order that measurements gave: 128x256, 256x128, 128x128."""
    pressures = [shared_pressure(Tile(*size)) for size in ((128, 256), (256, 128), (128, 128), (64, 32))]
    assert pressures == sorted(pressures)
    assert pressures[0] == pytest.approx(1.0)


def test_groups_of_rows_make_a_wave_about_square():
    assert group_m(Tile(128, 256), 132) == 16
    assert group_m(Tile(256, 128), 132) == 8
    assert group_m(Tile(128, 256, 2, 1), 132) == 8  # of pairs


def test_predictions_that_are_alike_give_the_larger_tile():
    tiles = [Tile(128, 224), Tile(128, 256), Tile(128, 256, 2, 1)]
    ranked = rank(Problem(8192, 8192, 8192), tiles)
    assert abs(ranked[0][1].us / ranked[1][1].us - 1) < 0.015
    assert ranked[0][0] == Tile(128, 256)


SIZES = st.one_of(st.integers(1, 600), st.sampled_from((1024, 2112, 4096, 7168, 24576, 129280)))


@given(
    m=st.integers(0, 14).map(lambda i: 1 << i),
    n=SIZES.map(lambda n: 8 * n),
    k=SIZES.map(lambda k: 8 * k),
    layout=st.sampled_from((NT, NN, TN, TT)),
    out_bits=st.sampled_from((16, 32)),
    gated=st.sampled_from((0, 1)),
)
def test_every_choice_can_be_compiled_and_launched(m, n, k, layout, out_bits, gated):
    where = bucket(m, n, k, layout, out_bits, gated)
    config = dense.configure(where, BF16)
    assert config in dense.CONFIGS
    for each in (config, *dense.candidates(where, BF16)):
        check_legal(each, layout, gated)


def check_legal(config, layout, gated):
    """The static assertions of dense.cuh."""
    groups = 1 if config.block_m == 64 else 2
    assert config.block_m in (64, 128)
    assert config.block_n % 16 == 0
    assert config.block_m // (64 * groups) * config.block_n <= 256
    assert not gated or config.block_n % 32 == 0
    assert config.cluster_m * config.cluster_n in (1, 2)
    assert config.cluster_m * config.cluster_n * config.split <= 8
    assert config.stages >= 4
    columns = config.block_n if layout in (NT, TT) else -(-config.block_n // 64) * 64
    ring = config.stages * (config.block_m + columns) * 128
    shared = ring + (groups * 2 * 64 * 128 if config.split == 1 else 0)
    assert config.split == 1 or split_bytes(config) <= ring, "parcels lie in the ring"
    assert shared + 1024 <= SHARED_LIMIT


def split_bytes(config):
    """SplitK::kBytes: parcels of eight columns from every block, for the columns that a block owns."""
    owned = -(-config.block_n // 8 // config.split)
    return config.split * owned * 8 * config.block_m * 4


def test_a_cluster_needs_two_tiles_to_share():
    for config in dense.candidates(bucket(64, 32, 7168), BF16):
        assert config.cluster_m == config.cluster_n == 1


def test_few_rows_go_to_their_own_kernel():
    backend = implementations("matmul", "fwd")["cuda"]
    assert [kernel.kernel for kernel in backend.kernels] == ["sm90.few_rows", "sm90.dense"]
    few = backend.configure(bucket(16, 4096, 7168), BF16)
    assert type(few) is few_rows.Config and few in few_rows.CONFIGS
    assert type(backend.configure(bucket(16, 4096, 7168, TN), BF16)) is dense.Config  # few_rows reads a along K alone
    assert type(backend.configure(bucket(INVARIANT_ROWS, 4096, 7168), BF16)) is dense.Config
    tried = backend.candidates(bucket(64, 4096, 7168), BF16)
    assert {type(config) for config in tried} == {few_rows.Config, dense.Config}


def test_a_batch_reaches_the_cost_model_through_its_bucket():
    """Eight products of 512 rows fill the machine with large tiles, one does not."""
    one = bucket(512, 4096, 7168)
    assert dense.configure(BmmBucket(8, *one), BF16)[:2] == (128, 256)
    assert dense.configure(one, BF16) == dense.configure(BmmBucket(1, *one), BF16)
    assert dense.configure(one, BF16) != dense.configure(BmmBucket(8, *one), BF16)


def test_the_prediction_is_printed(monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_PRINT_CONFIGS", "1")
    settings.reload()
    forget_logged()
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        dense.configure(bucket(4096, 584, 7168), BF16)
    (record,) = caplog.records
    assert "us predicted" in record.getMessage()
    assert "tiles in" in record.getMessage()
