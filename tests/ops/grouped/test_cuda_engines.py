"""The CUDA engines of grouped products without a GPU: what they choose, refuse, launch and compile.

What they compute is `tests/ops/test_contracts.py` on a Hopper GPU; how they walk is `test_cuda_walk.py`.
"""

from types import SimpleNamespace

import pytest
import torch

from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.gemm.grouped.args import UNSCALED
from tilewright.ops.gemm.kernels.sm90 import k_cuda, rows_cuda
from tilewright.ops.gemm.kernels.sm90.config_cuda import named, own
from tilewright.ops.gemm.kernels.sm90.dense import DENSE, DEPTH, ROWS
from tilewright.ops.gemm.kernels.sm90.few_rows_model import MAX_ROWS
from tilewright.ops.gemm.scaled.scaling import Scaling

bf16, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
LAYERS = [(6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)]  # DeepGEMM's
NT, NN, TN = range(3)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as being on a Hopper GPU."""
    for engine in (rows_cuda, k_cuda, rows_cuda.fp8_cuda):
        monkeypatch.setattr(engine, "device_info", lambda device: SimpleNamespace(arch="sm_90"))


def rows_bucket(rows, n, k, groups, scaling=UNSCALED, layout=NT):
    return rows, n, k, groups, layout, 1, 16, 0, int(scaling)


def k_bucket(depth, m, n, groups, scaling=UNSCALED, layout=TN):
    return depth, m, n, groups, layout, 1, 32, int(scaling)


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
@pytest.mark.parametrize("rows", [1, 16, 64, 128, 1024, 8192])
@pytest.mark.parametrize(("dtype", "scaling"), [(bf16, UNSCALED), (fp8, Scaling.TOKEN_BLOCK)])
def test_rows_take_the_engine_for_their_number(n, k, groups, rows, dtype, scaling):
    config = rows_cuda.configure(rows_bucket(rows, n, k, groups, scaling), dtype)
    assert config in rows_cuda.CONFIGS
    assert config.kernel == ("few_rows" if rows <= MAX_ROWS else "dense" if dtype == bf16 else "fp8")
    assert config.cluster_m <= 1, "pairs of row tiles in each group"


def test_a_that_runs_along_m_is_for_many_rows():
    assert rows_cuda.configure(rows_bucket(16, 4096, 4096, 8, layout=TN), bf16).kernel == "dense"


def test_the_tuner_tries_both_engines_where_both_can_run():
    found = rows_cuda.candidates(rows_bucket(64, 4096, 4096, 8), bf16)
    assert {config.kernel for config in found} == {"few_rows", "dense"}
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("dtype", "scaling"), [(bf16, UNSCALED), (fp8, Scaling.TOKEN_TOKEN)])
@pytest.mark.parametrize("groups", [0, 1, 16])
def test_groups_along_k_choose_for_an_equal_share(dtype, scaling, groups):
    bucket = k_bucket(32768, 4096, 7168, groups, scaling)
    config = k_cuda.configure(bucket, dtype)
    assert config in k_cuda.CONFIGS
    assert config.kernel == ("dense" if dtype == bf16 else "fp8")
    assert config in k_cuda.candidates(bucket, dtype)


@pytest.mark.parametrize("engine", [rows_cuda, k_cuda])
def test_configs_survive_being_one_type(engine):
    assert len(set(engine.CONFIGS)) == len(engine.CONFIGS)
    for config in engine.CONFIGS:
        assert named(config.kernel, own(config)) == config


# ----------------------------------------------------------------------------------------------- what they refuse


def test_rows_are_for_hopper():
    a, b = torch.empty(1, 64, 64, dtype=bf16), torch.empty(2, 64, 64, dtype=bf16)
    assert "Hopper" in rows_cuda.why_not(a, b, None, None, None, ends_of(1, 2), 32, "", bf16)


@pytest.mark.parametrize(
    ("a", "b", "out", "words"),
    [
        pytest.param((1, 60, 64), (2, 64, 32), bf16, None, id="runs"),
        pytest.param((1, 60, 60), (2, 60, 32), bf16, "16 bytes", id="rows that are not aligned"),
        pytest.param((1, 60, 64), (2, 64, 36), bf16, "16 bytes", id="a result that is not aligned"),
        pytest.param((1, 60, 64), (2, 64, 32), torch.float64, "fp32", id="float64"),
    ],
)
def test_rows_refuse(hopper, a, b, out, words):
    found = rows_cuda.why_not(
        torch.empty(a, dtype=bf16), torch.empty(b, dtype=bf16), None, None, None, ends_of(1, 2), 32, "", out
    )
    assert found is None if words is None else words in found


def test_rows_refuse_a_sum_of_nothing(hopper):
    """Columns of wider tensors, which begin at multiples of 16 bytes and would choose a tile for K = 0."""
    a, b = torch.empty(1, 60, 64, dtype=bf16)[..., :0], torch.empty(2, 64, 64, dtype=bf16)[:, :0]
    assert "K = 0" in str(rows_cuda.why_not(a, b, None, None, None, ends_of(1, 2), 32, "", bf16))


def test_float8_needs_scales(hopper):
    a, b = torch.empty(1, 64, 128, dtype=fp8), torch.empty(2, 256, 128, dtype=fp8).mT
    assert "bf16 or fp16" in rows_cuda.why_not(a, b, None, None, None, ends_of(1, 2), 32, "", bf16)
    of_a, of_b = Scaling.TOKEN_BLOCK.layouts
    scales = of_a.empty(64, 128, "cpu", 1), of_b.empty(256, 128, "cpu", 2)
    assert rows_cuda.why_not(a, b, *scales, None, ends_of(1, 2), 32, "", bf16) is None


def test_groups_along_k_refuse_columns_of_c_apart(hopper):
    a, b = torch.empty(128, 64, dtype=bf16).mT, torch.empty(128, 64, dtype=bf16)
    c = torch.empty(2, 64, 64)
    assert k_cuda.why_not(a, b, None, None, c, ends_of(1, 128), fp32) is None
    assert "along N" in k_cuda.why_not(a, b, None, None, c.mT, ends_of(1, 128), fp32)


# ----------------------------------------------------------------------------------------------- what they launch

TILE = named("dense", rows_cuda.dense_cuda.CONFIGS[0])


@pytest.mark.parametrize("batches", [1, 3])
def test_rows_take_the_walk_over_groups(batches):
    a, b = torch.empty(batches, 64, 64, dtype=bf16), torch.empty(3, 64, 32, dtype=bf16)
    d = torch.empty(batches, 64, 32, dtype=bf16)
    (params,) = kernels(lambda: rows_cuda.gemm(d, a, b, None, None, None, ends_of(1, 2, 3), "", TILE))
    assert (params.kWalk, params.kInto) == (ROWS, False)


def test_a_float32_c_is_added_by_the_copy_engine_where_it_is_d():
    a, b, ends = torch.empty(128, 64, dtype=bf16).mT, torch.empty(128, 64, dtype=bf16), ends_of(1, 128)
    d, c = torch.empty(2, 64, 64), torch.empty(2, 64, 64)
    (params,) = kernels(lambda: k_cuda.gemm(d, a, b, None, None, d, ends, TILE))
    assert (params.kWalk, params.kInto, params.kAddend) == (DEPTH, True, 0)
    found = kernels(lambda: k_cuda.gemm(d, a, b, None, None, c, ends, TILE))
    assert {(p.kInto, p.kAddend > 0) for p in found} == {(True, False), (False, True)}, "a warm-up cannot tell which"
    half = d.bfloat16()
    (params,) = kernels(lambda: k_cuda.gemm(half, a, b, None, None, half, ends, TILE))
    assert (params.kInto, params.kAddend) == (False, 2), "bf16 is rounded once: C in float32 first"


def test_dense_products_add_the_same_way():
    a, b, d = torch.empty(1, 64, 64, dtype=bf16), torch.empty(1, 64, 64, dtype=bf16), torch.empty(1, 64, 64)
    engine = rows_cuda.dense_cuda
    (params,) = kernels(lambda: engine.gemm(d, a, b, None, d, None, 1.0, "", own(TILE)))
    assert (params.kWalk, params.kInto) == (DENSE, True)


@pytest.mark.parametrize("c", [None, 2.0])
def test_no_k_at_all(c):
    """Nothing to launch: c, or zeros."""
    a, b = torch.empty(8, 0, dtype=bf16), torch.empty(0, 8, dtype=bf16)
    d = torch.full((2, 8, 8), torch.nan)
    addend = None if c is None else torch.full((2, 8, 8), c)
    k_cuda.gemm(d, a, b, None, None, addend, ends_of(0, 0), TILE)
    assert torch.equal(d, torch.full((2, 8, 8), c or 0.0))


# ----------------------------------------------------------------------------------------------- what they compile to


def dense(block_m, block_n, **fields):
    params = rows_cuda.dense_cuda.Params(
        *(block_m, block_n, 4, 1, 1, 0, 0, 0, False, 0, bf16, bf16, bf16, bf16),
    )
    return rows_cuda.dense_cuda.KERNEL, params._replace(**fields)


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(
    ("kernel", "params", "stores"),
    [
        pytest.param(*dense(128, 256, kWalk=ROWS), {"UTMASTG": 4}, id="rows"),
        pytest.param(*dense(64, 256, kWalk=ROWS, kMajorB=1), {"UTMASTG": 4}, id="rows-nn-64"),
        pytest.param(*dense(128, 256, kWalk=ROWS, kActivation=4, kClusterN=2), {"UTMASTG": 2}, id="rows-swiglu-pairs"),
        pytest.param(
            *dense(128, 256, kWalk=DEPTH, kMajorA=1, kMajorB=1, kInto=True, Out=fp32),
            {"UTMAREDG": 8},
            id="along-k-into",
        ),
        pytest.param(
            *dense(128, 256, kWalk=DEPTH, Out=fp32, kAddend=2, Addend=fp32), {"UTMASTG": 8}, id="along-k-nt-c"
        ),
        pytest.param(*dense(128, 256, kInto=True, Out=fp32), {"UTMAREDG": 8}, id="dense-into"),
    ],
)
def test_no_kernel_spills(kernel, params, stores):
    info = kernel.compile(params, "sm_90").info
    assert info["stack_bytes"] == 0 and info["warnings"] == []
    assert {name: info["instructions"].get(name) for name in stores} == stores
    assert info["instructions"]["HGMMA"] == 4, "one main loop"
