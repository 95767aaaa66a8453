"""The kernels of grouped products for Hopper without a GPU: what they choose, refuse, launch and compile.

What they compute is `tests/ops/test_contracts.py` on a Hopper GPU; the order of tiles is `test_tile_scheduler.py`.
"""

import pytest
import torch

from tilewright.dispatch import implementations
from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.grouped.args import UNSCALED, GroupedArgs, GroupedBucket, KGroupedArgs, KGroupedBucket
from tilewright.ops.gemm.kernels.sm90 import dense, dense_kernel, few_rows_grouped, fp8
from tilewright.ops.gemm.kernels.sm90.dense_kernel import GemmType
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS
from tilewright.ops.gemm.scaled.scaling import Scaling

bf16, e4m3, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
LAYERS = [(6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)]  # DeepGEMM's
NT, NN, TN = range(3)


@pytest.fixture(params=["grouped_matmul", "masked_matmul"])
def rows(request):
    """The backend of groups of rows."""
    return implementations(request.param, "fwd")["cuda"]


@pytest.fixture
def depth():
    """The backend of groups along K."""
    return implementations("k_grouped_matmul", "fwd")["cuda"]


def rows_bucket(rows, n, k, groups, scaling=UNSCALED, layout=NT):
    return GroupedBucket(rows, n, k, groups, layout, 1, 16, 0, int(scaling))


def k_bucket(depth, m, n, groups, scaling=UNSCALED, layout=TN):
    return KGroupedBucket(depth, m, n, groups, layout, 1, 32, int(scaling))


def ends_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def kernels(call):
    """Parameters of the kernels that a call would launch."""
    with collect("sm_90") as collector:
        call()
    return [job.key[2] for job in collector.jobs]


# ----------------------------------------------------------------------------------------------- what they choose


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("groups", [1, 8, 256])
@pytest.mark.parametrize("size", [1, 16, 64, 128, 1024, 8192])
@pytest.mark.parametrize(("dtype", "scaling"), [(bf16, UNSCALED), (e4m3, Scaling.TOKEN_BLOCK)])
def test_rows_take_the_kernel_for_their_number(rows, n, k, groups, size, dtype, scaling):
    config = rows.configure(rows_bucket(size, n, k, groups, scaling), dtype)
    kernel = few_rows_grouped if size <= MAX_ROWS else dense if dtype == bf16 else fp8
    assert type(config) is kernel.Config and config in kernel.CONFIGS
    assert getattr(config, "cluster_m", 1) == 1, "pairs of row tiles in each group"


def test_a_that_runs_along_m_is_for_many_rows(rows):
    assert type(rows.configure(rows_bucket(16, 4096, 4096, 8, layout=TN), bf16)) is dense.Config


def test_the_tuner_tries_both_kernels_where_both_can_run(rows):
    found = rows.candidates(rows_bucket(64, 4096, 4096, 8), bf16)
    assert {type(config) for config in found} == {few_rows_grouped.Config, dense.Config}
    assert len({(type(config), config) for config in found}) == len(found)


@pytest.mark.parametrize(("dtype", "scaling"), [(bf16, UNSCALED), (e4m3, Scaling.TOKEN_TOKEN)])
@pytest.mark.parametrize("groups", [0, 1, 16])
def test_groups_along_k_choose_for_an_equal_share(depth, dtype, scaling, groups):
    bucket = k_bucket(32768, 4096, 7168, groups, scaling)
    config = depth.configure(bucket, dtype)
    kernel = dense if dtype == bf16 else fp8
    assert type(config) is kernel.Config and config in kernel.CONFIGS
    assert config in depth.candidates(bucket, dtype)


# ----------------------------------------------------------------------------------------------- what they refuse


def why_not_rows(rows, a, b, scales=(None, None), out_dtype=bf16):
    return rows.supports(*GroupedArgs(a, b, *scales, None, ends_of(1, 2), 32, "", out_dtype))


def test_rows_are_for_hopper(rows):
    a, b = torch.empty(1, 64, 64, dtype=bf16), torch.empty(2, 64, 64, dtype=bf16)
    assert "Hopper" in why_not_rows(rows, a, b)


@pytest.mark.parametrize(
    ("a", "b", "out", "words"),
    [
        pytest.param((1, 60, 64), (2, 64, 32), bf16, None, id="runs"),
        pytest.param((1, 60, 60), (2, 60, 32), bf16, "16 bytes", id="rows that are not aligned"),
        pytest.param((1, 60, 64), (2, 64, 36), bf16, "16 bytes", id="a result that is not aligned"),
        pytest.param((1, 60, 64), (2, 64, 32), torch.float64, "fp32", id="float64"),
    ],
)
def test_rows_refuse(hopper, rows, a, b, out, words):
    """Where no kernel of the backend runs, the reason is that of the operands, not of one kernel."""
    found = why_not_rows(rows, torch.empty(a, dtype=bf16), torch.empty(b, dtype=bf16), out_dtype=out)
    assert found is None if words is None else words in found


def test_rows_refuse_a_sum_of_nothing(hopper, rows):
    """Columns of wider tensors, which begin at multiples of 16 bytes and would choose a tile for K = 0."""
    a, b = torch.empty(1, 60, 64, dtype=bf16)[..., :0], torch.empty(2, 64, 64, dtype=bf16)[:, :0]
    assert "K = 0" in str(why_not_rows(rows, a, b))


def test_float8_needs_scales(hopper, rows):
    a, b = torch.empty(1, 64, 128, dtype=e4m3), torch.empty(2, 256, 128, dtype=e4m3).mT
    assert "bf16 or fp16" in why_not_rows(rows, a, b)
    layout_a, layout_b = Scaling.TOKEN_BLOCK.layouts
    scales = layout_a.empty(64, 128, "cpu", 1), layout_b.empty(256, 128, "cpu", 2)
    assert why_not_rows(rows, a, b, scales) is None


def test_each_kernel_takes_the_operands_that_it_multiplies(hopper):
    a, b = torch.empty(1, 64, 64, dtype=bf16), torch.empty(2, 64, 64, dtype=bf16)
    args = GroupedArgs(a, b, None, None, None, ends_of(1, 2), 32, "", bf16)
    assert dense.why_not_rows(args) is None
    assert "with scales" in fp8.why_not_rows(args)


def test_groups_along_k_refuse_strided_columns_of_c(hopper, depth):
    a, b = torch.empty(128, 64, dtype=bf16).mT, torch.empty(128, 64, dtype=bf16)
    args = KGroupedArgs(a, b, None, None, torch.empty(2, 64, 64), ends_of(1, 128), fp32)
    assert depth.supports(*args) is None
    assert "along N" in depth.supports(*args._replace(c=args.c.mT))


# ----------------------------------------------------------------------------------------------- what they launch

TILE = dense.CONFIGS[0]


def k_args(a, b, c, ends, out_dtype=fp32):
    return KGroupedArgs(a, b, None, None, c, ends, out_dtype)


@pytest.mark.parametrize("batches", [1, 3])
def test_rows_take_the_tile_scheduler_of_groups(batches):
    a, b = torch.empty(batches, 64, 64, dtype=bf16), torch.empty(3, 64, 32, dtype=bf16)
    d = torch.empty(batches, 64, 32, dtype=bf16)
    args = GroupedArgs(a, b, None, None, None, ends_of(1, 2, 3), 64, "", bf16)
    (params,) = kernels(lambda: dense.gemm_rows(d, args, TILE))
    assert (params.kGemmType, params.kAccumulate) == (GemmType.GROUPED_M, False)


def test_a_float32_c_is_added_by_the_copy_engine_where_it_is_d():
    a, b, ends = torch.empty(128, 64, dtype=bf16).mT, torch.empty(128, 64, dtype=bf16), ends_of(1, 128)
    d, c = torch.empty(2, 64, 64), torch.empty(2, 64, 64)
    (params,) = kernels(lambda: dense.gemm_along_k(d, k_args(a, b, d, ends), TILE))
    assert (params.kGemmType, params.kAccumulate, params.kAddend) == (GemmType.GROUPED_K, True, 0)
    found = kernels(lambda: dense.gemm_along_k(d, k_args(a, b, c, ends), TILE))
    assert {(p.kAccumulate, p.kAddend > 0) for p in found} == {(True, False), (False, True)}, (
        "a warm-up cannot tell which"
    )
    half = d.bfloat16()
    (params,) = kernels(lambda: dense.gemm_along_k(half, k_args(a, b, half, ends, bf16), TILE))
    assert (params.kAccumulate, params.kAddend) == (False, 2), "bf16 is rounded once: C in float32 first"


def test_dense_products_add_the_same_way():
    a, b, d = torch.empty(1, 64, 64, dtype=bf16), torch.empty(1, 64, 64, dtype=bf16), torch.empty(1, 64, 64)
    (params,) = kernels(lambda: dense.gemm(d, plain_args(a, b, fp32)._replace(c=d), TILE))
    assert (params.kGemmType, params.kAccumulate) == (GemmType.DENSE, True)


@pytest.mark.parametrize("c", [None, 2.0])
def test_no_k_at_all(c):
    """Nothing to launch: c, or zeros."""
    a, b = torch.empty(8, 0, dtype=bf16), torch.empty(0, 8, dtype=bf16)
    d = torch.full((2, 8, 8), torch.nan)
    addend = None if c is None else torch.full((2, 8, 8), c)
    dense.gemm_along_k(d, k_args(a, b, addend, ends_of(0, 0)), TILE)
    assert torch.equal(d, torch.full((2, 8, 8), c or 0.0))


# ----------------------------------------------------------------------------------------------- what they compile to


def instance(block_m, block_n, **fields):
    params = dense_kernel.Params(*(block_m, block_n, 4, 1, 1, 0, 0, 0, False, 0, bf16, bf16, bf16, bf16))
    return dense_kernel.KERNEL, params._replace(**fields)


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(
    ("kernel", "params", "stores"),
    [
        pytest.param(*instance(128, 256, kGemmType=1), {"UTMASTG": 4}, id="rows"),
        pytest.param(*instance(64, 256, kGemmType=1, kMajorB=1), {"UTMASTG": 4}, id="rows-nn-64"),
        pytest.param(
            *instance(128, 256, kGemmType=1, kActivation=4, kClusterN=2), {"UTMASTG": 2}, id="rows-swiglu-pairs"
        ),
        pytest.param(
            *instance(128, 256, kGemmType=2, kMajorA=1, kMajorB=1, kAccumulate=True, Out=fp32),
            {"UTMAREDG": 8},
            id="along-k-into",
        ),
        pytest.param(
            *instance(128, 256, kGemmType=2, Out=fp32, kAddend=2, Addend=fp32), {"UTMASTG": 8}, id="along-k-nt-c"
        ),
        pytest.param(*instance(128, 256, kAccumulate=True, Out=fp32), {"UTMAREDG": 8}, id="dense-into"),
    ],
)
def test_no_kernel_spills(kernel, params, stores):
    info = kernel.compile(params, "sm_90").info
    assert info["stack_bytes"] == 0 and info["warnings"] == []
    assert {name: info["instructions"].get(name) for name in stores} == stores
    assert info["instructions"]["HGMMA"] == 4, "one main loop"
