"""Split K inside a cluster and boxes of rows that exist, for the dense kernels: what is chosen, refused, launched; on a
Hopper GPU, what is computed.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.gemm.scaled_problems import operands as scaled_operands

from tilewright.errors import InputError
from tilewright.hardware.sm_budget import set_sm_budget
from tilewright.ops.gemm.bmm import FORWARD as BMM
from tilewright.ops.gemm.dense.args import BmmBucket, MatmulArgs, MatmulBucket, plain_args
from tilewright.ops.gemm.grouped.args import GroupedBucket
from tilewright.ops.gemm.kernels.sm90 import (
    cost_model,
    dense,
    dense_kernel,
    fp8,
    fp8_cost_model,
    fp8_kernel,
    middle_cost,
)
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile
from tilewright.ops.gemm.matmul import FORWARD
from tilewright.ops.gemm.operands import apply_epilogue, columns_out
from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulArgs

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
UNWRITTEN = 768.0  # bf16 has it, and no product here gives it


def bucket(m, n, k, layout=0):
    return MatmulBucket(m, n, k, layout, 1, 16, 0)


def config_of(tile, along_n=False):
    return dense.config_of(Tile(*tile), cost_model.Problem(1, 1, 1, mn_major_b=along_n))


def fp8_config(tile, scaling=2):
    return fp8.config_of(Tile(*tile), fp8_cost_model.Problem(1, 1, 1, scaling=scaling))


# ----------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(("m", "n", "k"), [(128, 576, 7168), (128, 2112, 7168), (128, 3584, 18944)])
def test_few_tiles_of_long_k_are_split(m, n, k):
    config = dense.configure(bucket(m, n, k), bf16)
    assert config.split > 1 and config in dense.CONFIGS
    narrow = fp8.configure(ScaledBucket(m, n, k, 0, 1, 16, 0, 2), torch.float8_e4m3fn)
    assert narrow.split > 1 and narrow in fp8.CONFIGS


@pytest.mark.parametrize(("m", "n", "k"), [(512, 28672, 4096), (256, 37888, 3584), (128, 4096, 64), (4096, 576, 7168)])
def test_many_tiles_and_short_k_are_not(m, n, k):
    assert dense.configure(bucket(m, n, k), bf16).split == 1


def test_the_library_comes_first_unless_k_is_split():
    def torch_first(m, k, layout=0, first="cuda", n=4096):
        return FORWARD.torch_first(bucket(m, n, k, layout), bf16, first)

    assert not torch_first(128, 7168)
    assert torch_first(128, 4096) and torch_first(256, 7168)
    assert not torch_first(128, 3584, n=37888) and torch_first(192, 3584, n=37888)
    assert torch_first(128, 7168, layout=1) and torch_first(128, 7168, first="triton")
    assert BMM.torch_first(BmmBucket(8, 128, 4096, 7168, 0, 1, 16, 0), bf16, "cuda")


def test_groups_and_requantised_results_have_no_split():
    groups = GroupedBucket(16, 64, 576, 7168, 0, 1, 16, 0, -1)
    assert all(config.split == 1 for config in dense.candidates_rows(groups, bf16))
    quantised = ScaledBucket(128, 512, 7168, 0, 1, 8, 0, 2)
    assert all(config.split == 1 for config in fp8.candidates(quantised, torch.float8_e4m3fn))
    assert all(config.split == 1 for config in fp8.CONFIGS_FP8)


def test_half_of_k_takes_less_time_until_blocks_have_to_wait():
    problem = Problem(128, 2048, 16384)
    us = [middle_cost.predicted_us(problem, Tile(128, 128, split=split)) for split in (1, 2, 4, 8)]
    assert us[0] > us[1] > us[2]
    assert us[3] < us[0]
    short = problem._replace(k=128)
    assert middle_cost.predicted_us(short, Tile(128, 128, split=2)) > middle_cost.predicted_us(short, Tile(128, 128))


def test_a_split_has_as_many_steps_as_parts():
    tiles = [Tile(128, 128, split=split) for split in range(1, 9)]
    assert [t.split for t in tiles if middle_cost.fits(Problem(128, 4096, 200), t)] == [1, 2, 3, 4]
    assert [t.split for t in tiles if middle_cost.fits(Problem(128, 4096, 200, itemsize=1), t)] == [1, 2]


@given(m=st.integers(1, 600), tile=st.sampled_from([(64, 64), (64, 32), (128, 128), (128, 64), (192, 192), (192, 96)]))
def test_boxes_cover_the_rows_that_exist(m, tile):
    block_m, part_m = tile
    box = dense_kernel.box_rows(m, block_m, part_m)
    if m > dense_kernel.FEW_ROWS or m % block_m == 0:
        assert box == part_m
        return
    assert box == m <= part_m or (part_m % box == 0 and box % 8 == 0)
    outside = -m % box
    assert outside == 0 or outside < 32


# ----------------------------------------------------------------------------------------------- what is launched


class Launches:
    """Stands where the kernels and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls = [], []
        for module in (dense_kernel, fp8_kernel):
            monkeypatch.setattr(module, "tensor_map", lambda t, box, swizzle=0: self.maps.append((tuple(t.shape), box)))
            monkeypatch.setattr(module, "usable_sms", lambda _: 132)
            monkeypatch.setattr(module, "KERNEL", lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def test_a_cluster_has_a_block_for_each_part_and_no_staging(launches):
    a, b = torch.empty(1, 128, 512, dtype=bf16), torch.empty(1, 4096, 512, dtype=bf16).mT
    d = torch.empty(1, 128, 4096, dtype=bf16)
    config = config_of((128, 256, 1, 2, 3))
    dense_kernel.gemm(d, plain_args(a, b, bf16), config)
    (grid, args, params, options) = launches.calls[0]
    assert grid == (8 * 6,)
    assert options == {"block": 384, "shared_bytes": config.stages * (128 + 256) * 128, "cluster": (6, 1, 1)}
    assert (params.kSplitK, params.kClusterN, params.kTrim) == (3, 2, False)
    assert args.d is d and (args.d_pitch, args.d_batch) == (4096, 128 * 4096)


def test_clusters_that_run_at_once_take_tiles_in_turn(launches):
    a, b = torch.empty(1, 128, 512, dtype=bf16), torch.empty(1, 8192, 512, dtype=bf16).mT
    dense_kernel.gemm(torch.empty(1, 128, 8192, dtype=bf16), plain_args(a, b, bf16), config_of((128, 128, 1, 1, 4)))
    assert launches.calls[0][0] == (30 * 4,)


def test_rows_that_do_not_exist_are_not_loaded(launches):
    b = torch.empty(1, 256, 512, dtype=bf16).mT
    for rows, tile, box, trims in [
        (96, (64, 64, 1, 1, 1), 32, True),
        (96, (128, 128, 1, 1, 2), 96, True),
        (96, (128, 128, 1, 2, 2), 32, True),
        (100, (64, 64, 1, 1, 1), 32, True),
        (128, (128, 128, 1, 1, 2), 128, False),
        (520, (128, 128, 1, 1, 1), 128, False),
    ]:
        a, d = torch.empty(1, rows, 512, dtype=bf16), torch.empty(1, rows, 256, dtype=bf16)
        launches.maps.clear()
        dense_kernel.gemm(d, plain_args(a, b, bf16), config_of(tile))
        assert launches.maps[0] == ((1, rows, 512), (1, box, 64)), rows
        assert launches.calls[-1][1].box_m == box
        assert launches.calls[-1][2].kTrim is trims
        assert launches.calls[-1][2].kPrefetch is (rows <= 512)


def test_a_split_product_takes_the_result_as_c(launches):
    a, b = torch.empty(1, 128, 512, dtype=bf16), torch.empty(1, 256, 512, dtype=bf16).mT
    d = torch.zeros(1, 128, 256)
    args = plain_args(a, b, fp32)._replace(c=d)
    dense_kernel.gemm(d, args, config_of((128, 128)))
    assert launches.calls[-1][2].kAccumulate and launches.calls[-1][2].kAddend == 0
    dense_kernel.gemm(d, args, config_of((128, 128, 1, 1, 2)))
    assert not launches.calls[-1][2].kAccumulate and launches.calls[-1][2].kAddend == 2


def test_parts_without_steps_are_refused(launches):
    a, b = torch.empty(1, 128, 120, dtype=bf16), torch.empty(1, 256, 120, dtype=bf16).mT
    d = torch.empty(1, 128, 256, dtype=bf16)
    dense_kernel.gemm(d, plain_args(a, b, bf16), config_of((128, 128, 1, 1, 2)))
    with pytest.raises(InputError, match="K has 2 steps"):
        dense_kernel.gemm(d, plain_args(a, b, bf16), config_of((128, 128, 1, 1, 3)))
    narrow = scaled_operands(128, 256, 256, batch=(1,))
    product = ScaledMatmulArgs(*narrow, None, None, 1.0, "", bf16)
    with pytest.raises(InputError, match="K has 2 steps"):
        fp8_kernel.gemm(d, product, fp8_config((128, 128, 1, 1, 3)))
    assert len(launches.calls) == 1


# ----------------------------------------------------------------------------------------------- what is computed


@pytest.fixture
def hopper_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def drawn(*shape, dtype=bf16, turned=False):
    if turned:
        return drawn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    return torch.randn(shape, device="cuda").to(dtype)


def guarded(batch, rows, columns, dtype):
    """A result whose matrices are followed by rows that must not be written."""
    whole = torch.full((batch, rows + 3, columns), UNWRITTEN, dtype=dtype, device="cuda")
    return whole, whole[:, :rows]


def assert_near(found, exact, bound):
    """Every tile of 64 x 64 is near."""
    for batch in range(found.shape[0]):
        for f, e in zip(found[batch].double().split(64, -1), exact[batch].split(64, -1), strict=True):
            for tile, right in zip(f.split(64, -2), e.split(64, -2), strict=True):
                assert (tile - right).norm() <= bound * right.norm()


BOUNDS = {bf16: 5e-3, fp16: 1.5e-3, fp32: 1e-3}
DENSE = {  # rows, columns, depth, layout, batch, tile, activation, element, out
    "one tile, two parts": (128, 128, 256, "nt", 1, (128, 128, 1, 1, 2), "", bf16, bf16),
    "eight parts of one step": (128, 256, 512, "nt", 1, (128, 256, 1, 1, 8), "", bf16, fp32),
    "parts of unequal length": (64, 192, 1000, "nt", 1, (64, 192, 1, 1, 7), "", bf16, bf16),
    "576 columns": (128, 576, 7168, "nt", 1, (128, 144, 1, 1, 8), "", bf16, bf16),
    "2112 columns": (100, 2112, 7168, "nt", 1, (128, 96, 1, 1, 5), "gelu", bf16, bf16),
    "long K": (96, 3584, 18944, "nt", 1, (128, 128, 1, 2, 4), "", bf16, bf16),
    "pairs share rows": (77, 1000, 2048, "nt", 1, (128, 128, 1, 2, 3), "silu", fp16, fp16),
    "pairs share columns": (192, 1000, 2048, "nt", 1, (64, 256, 2, 1, 4), "", bf16, bf16),
    "a row of tiles outside": (130, 328, 1096, "nt", 1, (64, 96, 2, 1, 3), "relu", bf16, fp32),
    "one row": (1, 264, 1024, "nt", 1, (64, 32, 1, 1, 6), "", bf16, bf16),
    "parcels without an owner": (70, 96, 640, "nt", 1, (64, 32, 1, 1, 8), "", bf16, bf16),
    "weights along N": (200, 520, 1096, "nn", 1, (128, 80, 2, 1, 2), "gelu", bf16, bf16),
    "rows along M": (200, 520, 1096, "tn", 1, (128, 112, 1, 2, 3), "", fp16, fp32),
    "both across": (136, 520, 1096, "tt", 1, (64, 64, 1, 1, 5), "silu", bf16, bf16),
    "gated": (129, 1024, 2048, "nt", 1, (128, 256, 1, 1, 4), "swiglu", bf16, bf16),
    "gated, fp32": (257, 528, 2048, "nt", 1, (64, 128, 2, 1, 2), "swiglu", bf16, fp32),
    "a batch": (70, 200, 640, "nt", 5, (64, 64, 1, 1, 4), "", bf16, bf16),
    "a batch of pairs": (150, 200, 640, "nt", 7, (128, 96, 2, 1, 2), "relu", bf16, bf16),
    "several tiles a cluster": (512, 8192, 768, "nt", 1, (128, 128, 1, 1, 4), "", bf16, bf16),
    "several tiles a pair": (500, 9000, 776, "nn", 1, (128, 160, 2, 1, 2), "", bf16, bf16),
    "no split, rows left out": (96, 1536, 1096, "nt", 1, (64, 64, 1, 1, 1), "", bf16, bf16),
    "no split, odd rows left out": (161, 1544, 1096, "nt", 3, (128, 96, 1, 2, 1), "gelu", bf16, bf16),
    "no split, pairs, rows left out": (161, 1544, 1096, "nt", 1, (64, 96, 2, 1, 1), "", bf16, fp32),
}


def dense_problem(case):
    """(gemm into d, exact result, whole result, result) of a case, with bias, addend and scale."""
    rows, columns, depth, layout, batch, tile, activation, element, out = DENSE[case]
    a = drawn(batch, rows, depth, dtype=element, turned=layout[0] == "t")
    b = drawn(batch, depth, columns, dtype=element, turned=layout[1] == "t")
    whole, d = guarded(batch, rows, columns_out(columns, activation), out)
    bias, c, scale = drawn(columns, dtype=fp32), drawn(*d.shape), torch.tensor([0.5], device="cuda")
    args = MatmulArgs(a, b, bias, c, scale, depth**-0.5, activation, out)
    config = config_of(tile, layout[1] == "n")
    exact = apply_epilogue(0.5 * depth**-0.5 * (a.double() @ b.double()), bias, c, activation, torch.float64)
    return lambda: dense_kernel.gemm(d, args, config), exact, whole, d


@pytest.mark.gpu
@pytest.mark.parametrize("case", DENSE)
def test_dense_results(case, hopper_gpu):
    run, exact, whole, d = dense_problem(case)
    run()
    assert_near(d, exact, BOUNDS[d.dtype])
    assert (whole[:, d.shape[1] :] == UNWRITTEN).all()
    first = d.clone()
    for _ in range(20):
        d.fill_(torch.nan)
        run()
        assert torch.equal(d, first), "the same bits every time"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["576 columns", "pairs share rows", "a batch of pairs", "both across", "parcels without an owner"]
)
def test_blocks_with_many_tiles(case, hopper_gpu):
    """On eight multiprocessors a cluster takes many tiles, so that the ring is used again after every exchange."""
    run, exact, _, d = dense_problem(case)
    run()
    first = d.clone()
    set_sm_budget(8)
    try:
        for _ in range(5):
            d.fill_(torch.nan)
            run()
            assert torch.equal(d, first)
    finally:
        set_sm_budget(None)
    assert_near(d, exact, BOUNDS[d.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_plain_products_of_many_sizes(part, hopper_gpu):
    """Without bias, addend and scale; sizes next to tiles and steps, configs in turn."""
    tiles = (*dense.SPLITS, *dense.TILES)[::11][part::4]
    sizes = [(m, n, k) for m in (1, 63, 65, 96, 127, 129, 192, 300) for n, k in ((8, 520), (136, 1088), (1048, 2056))]
    for index, (m, n, k) in enumerate(sizes):
        a, b = drawn(1, m, k), drawn(1, k, n, turned=True)
        exact = a.double() @ b.double()
        for tile in tiles[index % 2 :: 2]:
            whole, d = guarded(1, m, n, bf16)
            dense_kernel.gemm(d, plain_args(a, b, bf16), config_of(tile))
            assert_near(d, exact, 5e-3)
            assert (whole[:, m:] == UNWRITTEN).all(), (m, n, k, tile)


@pytest.mark.gpu
def test_a_result_in_place_is_added_to_once(hopper_gpu):
    a, b, start = drawn(1, 200, 2048), drawn(1, 2048, 520, turned=True), drawn(1, 200, 520, dtype=fp32)
    config = config_of((128, 96, 1, 1, 4))
    d, product = start.clone(), torch.empty_like(start)
    dense_kernel.gemm(d, plain_args(a, b, fp32)._replace(c=d), config)
    dense_kernel.gemm(product, plain_args(a, b, fp32), config)
    assert torch.equal(d, start + product)


@pytest.mark.gpu
def test_streams_and_graphs(hopper_gpu):
    """Two streams at once, and a graph of launches that follow each other without a pause, other kernels between."""
    a, b, other = drawn(1, 100, 4096), drawn(1, 4096, 2112, turned=True), drawn(1, 4096, 576, turned=True)
    first, second = config_of((128, 96, 1, 1, 5)), config_of((128, 144, 1, 2, 2))
    x, y = (torch.empty(1, 100, n, dtype=bf16, device="cuda") for n in (2112, 576))

    def both():
        dense_kernel.gemm(x, plain_args(a, b, bf16), first)
        dense_kernel.gemm(y, plain_args(a, other, bf16), second)

    both()
    wanted = x.clone(), y.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    z = torch.full_like(x, torch.nan)
    for _ in range(50):
        both()
        with torch.cuda.stream(side):
            dense_kernel.gemm(z, plain_args(a, b, bf16), first)
    torch.cuda.synchronize()
    assert torch.equal(x, wanted[0]) and torch.equal(y, wanted[1]) and torch.equal(z, wanted[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            both()
    for _ in range(10):
        x.fill_(torch.nan), y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, wanted[0]) and torch.equal(y, wanted[1])


SCALED = {  # rows, columns, depth, scales, batch, tile, activation, out
    "blocks": (128, 576, 7168, "token_block", 1, (128, 96, 1, 1, 8), "", bf16),
    "long K": (100, 3584, 18944, "token_block", 1, (128, 128, 1, 2, 4), "", bf16),
    "one step a part": (96, 264, 512, "token_block", 1, (128, 128, 1, 1, 4), "gelu", bf16),
    "two blocks of scales a tile": (250, 1160, 1168, "token_block", 2, (128, 192, 1, 1, 3), "", fp32),
    "pairs share columns": (200, 1032, 2048, "token_block", 1, (64, 128, 2, 1, 4), "relu", bf16),
    "pairs, no split": (200, 1032, 2048, "token_block", 1, (128, 96, 1, 2, 1), "", bf16),
    "two passes": (70, 1032, 2048, "token_block", 1, (64, 256, 1, 2, 3), "", bf16),
    "two passes of two": (300, 1032, 2048, "token_block", 1, (128, 256, 1, 1, 5), "silu", bf16),
    "three warpgroups": (200, 520, 1168, "token_block", 1, (192, 128, 2, 1, 2), "", bf16),
    "gated": (129, 1056, 2048, "token_block", 1, (128, 128, 1, 1, 4), "swiglu", bf16),
    "by token": (129, 1032, 2048, "token_token", 2, (128, 96, 1, 2, 2), "", fp32),
    "by row": (333, 1032, 2048, "row", 1, (128, 128, 2, 1, 3), "silu", bf16),
    "tensor": (65, 1032, 2048, "tensor", 2, (64, 64, 1, 1, 6), "", bf16),
    "several tiles a cluster": (512, 8192, 1024, "token_block", 1, (128, 128, 1, 1, 4), "", bf16),
    "no split, rows left out": (96, 1032, 2048, "token_block", 1, (64, 64, 1, 1, 1), "", bf16),
}
NUMBERS = {"tensor": 0, "row": 1, "token_block": 2, "token_token": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SCALED)
def test_scaled_results(case, hopper_gpu):
    rows, columns, depth, pair, batch, tile, activation, out = SCALED[case]
    given_operands = scaled_operands(rows, columns, depth, pair, (batch,), "cuda")
    bias, config = drawn(columns, dtype=fp32), fp8_config(tile, NUMBERS[pair])
    whole, d = guarded(batch, rows, columns_out(columns, activation), out)
    c = drawn(*d.shape)
    args = ScaledMatmulArgs(*given_operands, bias, c, 0.25, activation, out)
    fp8_kernel.gemm(d, args, config)
    assert_near(d, given_operands.exact(bias, c, 0.25, activation), {bf16: 5e-3, fp32: 2e-3}[out])
    assert (whole[:, rows:] == UNWRITTEN).all()
    first = d.clone()
    for budget in (None, 16):
        set_sm_budget(budget)
        try:
            for _ in range(10):
                d.fill_(torch.nan)
                fp8_kernel.gemm(d, args, config)
                assert torch.equal(d, first), "the same bits every time"
        finally:
            set_sm_budget(None)
