"""The dense cuTile kernel: on a CPU in the emulation of the language, and its binaries.

Every 16x16 tile of a result is compared with float64: within 2^-8 (bf16), 2^-11 (fp16) or 2^-20 (float32) of the
largest number that was added up for it.
"""

import pytest
import torch
from tests.harness.cutile_emulation import emulated
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.jit.collect import collect
from tilewright.jit.compilers import tileiras
from tilewright.ops.gemm.dense.args import MatmulArgs, MatmulBucket, plain_args
from tilewright.ops.gemm.kernels.cutile.dense import CONFIGS, Config, candidates, configure, gemm, why_not
from tilewright.ops.gemm.operands import ACTIVATIONS, LAYOUTS, apply_epilogue, columns_out

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ROUNDING = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-20}
SMALL = Config(32, 64, 32, 4, group_m=2)  # several tiles of a small problem, so that their order shows
FORMS = {"tiles": SMALL, "swapped": SMALL._replace(swap=True), "sliced": SMALL._replace(slice_n=32)}


def operands(batch, m, n, k, layout="nt", dtype=BF16, seed=0):
    """a (B, M, K) and b (B, K, N), stored as `layout` says; rows differ by powers of two, so that a swap would show."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(batch, m, k, generator=g) * 2.0 ** torch.randint(-3, 4, (batch, m, 1), generator=g)
    b = torch.randn(batch, k, n, generator=g) * 2.0 ** torch.randint(-3, 4, (batch, 1, n), generator=g)
    a, b = a.to(dtype), b.to(dtype)
    return (a.mT.contiguous().mT if layout[0] == "t" else a), (b.mT.contiguous().mT if layout[1] == "t" else b)


def agree(d, a, b, bias, c, scale, alpha, activation, config):
    """Launch into d and compare with float64; c may be d."""
    factor = alpha * (1.0 if scale is None else float(scale))
    wide_bias, wide_c = (None if t is None else t.double() for t in (bias, c))
    z = factor * (a.double() @ b.double())
    expected = apply_epilogue(z, wide_bias, wide_c, activation, torch.float64)
    size = abs(factor) * (a.double().abs() @ b.double().abs()) + (0 if bias is None else wide_bias.abs())
    if activation == "swiglu":
        size = size[..., 0::2] * size[..., 1::2].clamp(min=1)
    size = size + (0 if c is None else wide_c.abs())
    if c is not d:
        d.fill_(torch.nan)
    with emulated():
        gemm(d, MatmulArgs(a, b, bias, c, scale, alpha, activation, d.dtype), config)
    wrong = ((d.double() - expected).abs() / size.clamp(min=1e-30)).nan_to_num(torch.inf)
    for m in range(0, d.shape[1], 16):
        for n in range(0, d.shape[2], 16):
            worst = float(wrong[:, m : m + 16, n : n + 16].max())
            assert worst <= ROUNDING[d.dtype], f"tile at {m}, {n} is off by {worst:.2e} with {config}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 65, 31), (130, 200, 96)], ids=lambda s: "x".join(map(str, s)))
def test_layouts_and_ragged_sizes(sizes, layout, form):
    a, b = operands(1, *sizes, layout)
    agree(torch.empty(1, *sizes[:2], dtype=BF16), a, b, None, None, None, 1.0, "", FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation, out, form):
    a, b = operands(2, 40, 72, 48, dtype=FP16)
    g = torch.Generator().manual_seed(1)
    n_out = columns_out(72, activation)
    c = torch.randn(2, n_out, 40, generator=g).mT.to(BF16)  # of any strides
    bias, scale = torch.randn(72, generator=g), torch.tensor(0.25)
    agree(torch.empty(2, 40, n_out, dtype=out), a, b, bias, c, scale, -0.5, activation, FORMS[form])


@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_c_may_be_the_result(activation):
    a, b = operands(2, 70, 130, 64)
    d = torch.randn(2, 70, columns_out(130, activation), generator=torch.Generator().manual_seed(2))
    agree(d, a, b, None, d, None, 1.0, activation, SMALL)


@pytest.mark.parametrize("fast", [True, False])
def test_float8_with_a_scale_on_the_device(fast):
    a, b = operands(1, 50, 80, 160, dtype=FP8)
    scale = torch.tensor([3.0])
    agree(torch.empty(1, 50, 80, dtype=BF16), a, b, None, None, scale, 1.0, "", SMALL._replace(fast_acc=fast))


def test_views_whose_strides_are_not_dense():
    a, b = operands(3, 90, 110, 70)
    a, b = a[1:, 3:80:2, 5:], b[1:, 5:, 1:100]
    d = torch.empty(2, 60, 200, dtype=BF16)[:, 4:43, 8:107]
    agree(d, a, b, None, None, None, 1.0, "", SMALL)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_nan_and_infinity_reach_only_their_row(name):
    a, b = operands(1, 3, 64, 32)
    a[0, 1] = torch.nan
    d = torch.empty(1, 3, 64, dtype=FP32)
    with emulated():
        gemm(d, plain_args(a, b, FP32, name), SMALL)
    assert d[0, 1].isnan().all()
    assert d[0, ::2].isfinite().all()


@pytest.mark.parametrize("config", dict.fromkeys(c._replace(num_warps=4, occupancy=1) for c in CONFIGS), ids=str)
def test_every_default_computes_one_row(config):
    """Batch invariance demands the configuration of a large batch for any number of rows."""
    a, b = operands(1, 1, 100, 72, dtype=FP8 if config.fast_acc else BF16)
    agree(torch.empty(1, 1, 100, dtype=BF16), a, b, None, None, None, 1.0, "", config)


BUCKETS = [
    MatmulBucket(m, n, 7168, layout, aligned, bits, gated)
    for m in (1, 16, 64, 128, 4096)
    for n in (2, 576, 7168, 129280)
    for layout in range(4)
    for aligned in (0, 1)
    for bits in (16, 32)
    for gated in (0, 1)
]


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_choices_are_few_legal_and_known(dtype):
    for bucket in BUCKETS:
        assert configure(bucket, dtype) in CONFIGS
        found = candidates(bucket, dtype)
        assert len(set(found)) == len(found) <= 64
        for config in found:
            assert config.num_warps in (4, 8)
            assert config.block_n % (config.slice_n or 1) == 0
            assert config.block_k * dtype.itemsize >= 32, "one step of the matrix unit"
            assert config.fast_acc == (dtype == FP8)


def test_the_rule_fills_the_gpu():
    pick = lambda m, n: configure(MatmulBucket(m, n, 7168, 0, 1, 16, 0), BF16)  # noqa: E731
    assert pick(8192, 8192)[:2] == (128, 256)  # 2048 tiles: the fastest wins
    assert pick(4096, 2112)[:2] == (128, 128)  # 288 tiles of 128x256 would take three waves of 132
    assert pick(16, 4096)[:2] == (16, 64)
    assert pick(16, 4096).swap
    assert pick(16, 129280)[:2] == (16, 128)
    assert configure(MatmulBucket(4096, 8192, 4096, 0, 1, 32, 0), BF16).slice_n == 64, (
        "a float32 tile leaves two stages"
    )


def test_float32_operands_are_refused():
    a, b = operands(1, 8, 8, 8, dtype=FP32)
    assert "float32" in why_not(plain_args(a, b, FP32))
    assert why_not(plain_args(a.to(BF16), b.to(BF16), FP32)) is None


# Binaries.  What is compiled is what would be launched.

needs_tileiras = [
    pytest.mark.compile,
    pytest.mark.skipif(tileiras.compiler.version() is None, reason=tileiras.compiler.install()),
]


def compiled(arch, layout, dtype, config, *, out=BF16, activation="", add=None, bias=False, sizes=(4096, 4096, 4096)):
    m, n, k = sizes
    with FakeTensorMode():
        a = torch.empty(1, k, m, dtype=dtype).mT if layout[0] == "t" else torch.empty(1, m, k, dtype=dtype)
        b = torch.empty(1, n, k, dtype=dtype).mT if layout[1] == "t" else torch.empty(1, k, n, dtype=dtype)
        d = torch.empty(1, m, columns_out(n, activation), dtype=out)
        c = None if add is None else torch.empty(d.shape, dtype=add)
        with collect(arch) as collector:
            addend = torch.empty(n, dtype=dtype) if bias else None
            gemm(d, MatmulArgs(a, b, addend, c, None, 1.0, activation, out), config)
    (job,) = collector.jobs
    return job.compile().info


def default(layout, dtype, *, m=4096, aligned=1, bits=16):
    return configure(MatmulBucket(m, 4096, 4096, LAYOUTS.index(layout), aligned, bits, 0), dtype)


class TestBinaries:
    pytestmark = needs_tileiras

    @pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_hopper_multiplies_from_shared_memory_that_the_copy_engine_fills(self, layout, dtype):
        info = compiled("sm_90", layout, dtype, default(layout, dtype))
        assert info["spills"] == 0
        assert {"HGMMA" if dtype == BF16 else "QGMMA", "UTMALDG", "UTMASTG"} == set(info["instructions"])

    @pytest.mark.parametrize("rows", [16, 32, 64])
    def test_few_rows_use_the_warpgroup_unit_too(self, rows):
        info = compiled("sm_90", "nt", BF16, default("nt", BF16, m=rows), sizes=(rows, 4096, 4096))
        assert info["spills"] == 0
        assert "HGMMA" in info["instructions"]
        assert "HMMA" not in info["instructions"]

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_epilogues_do_not_spill(self, activation):
        config = default("nt", BF16)
        assert compiled("sm_90", "nt", BF16, config, activation=activation, bias=True, add=BF16)["spills"] == 0

    def test_float32_results_do_not_spill(self):
        config = default("nt", BF16, bits=32)
        assert compiled("sm_90", "nt", BF16, config, out=FP32)["spills"] == 0
        assert compiled("sm_90", "nt", BF16, config, out=FP32, add=FP32)["spills"] == 0

    @pytest.mark.parametrize("sizes", [(1, 9, 64), (1, 33, 64)])
    def test_rows_that_are_no_whole_vectors_leave_without_the_copy_engine(self, sizes):
        info = compiled("sm_90", "nt", BF16, default("nt", BF16, m=1, aligned=0), sizes=sizes)
        assert set(info["instructions"]) == {"HGMMA", "UTMALDG"}

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_misaligned_operands_go_without_the_copy_engine(self, layout):
        config = default(layout, BF16, aligned=0)
        info = compiled("sm_90", layout, BF16, config, sizes=(4097, 4099, 4101))
        assert info["spills"] == 0
        assert set(info["instructions"]) == {"HGMMA"}

    @pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
    def test_later_architectures(self, arch):
        for dtype in (BF16, FP8):
            assert compiled(arch, "nt", dtype, default("nt", dtype))["spills"] == 0
