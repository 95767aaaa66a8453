"""The kernel for up to 16 rows: what it refuses and launches, how it compiles, and on a Hopper GPU what it computes."""

import pytest
import torch
from tests.ops.gemm import scaled_problems
from tests.ops.gemm.bounds import check, operands

from tilewright.errors import InputError
from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.gemm.engines.few_rows import skinny as engine
from tilewright.ops.gemm.engines.few_rows.skinny import Config
from tilewright.ops.gemm.operands import ACTIVATIONS, columns_out
from tilewright.ops.gemm.scaling import Scaling

bf16, fp16, fp32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SCALINGS = [Scaling.TENSOR, Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN]
POISON = -77.0
SIZES = [(rows, n, k) for rows in (1, 8, 9, 16) for n, k in ((576, 7168), (2112, 7168), (4096, 4096), (24576, 1536))]


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def candidates(rows, columns, depth, *scaling):
    return list(engine.candidates((rows, columns, depth, 0, 1, 16, 0, *scaling), FP8 if scaling else bf16))


def run(config, a, b, activation="", out=bf16, **terms):
    """The result, after a look at what surrounds it."""
    shape = (a.shape[0], a.shape[1], columns_out(b.shape[-1], activation))
    around = torch.full((shape[0] + 1, shape[1] + 3, shape[2] + 8), POISON, dtype=out, device=a.device)
    d = around[: shape[0], : shape[1], : shape[2]]
    d.fill_(torch.nan)
    given = {"bias": None, "c": None, "alpha": 1.0, **terms}
    if "scales" in terms:
        engine.scaled(d, a, b, *terms["scales"], given["bias"], given["c"], given["alpha"], activation, config)
    else:
        engine.gemm(d, a, b, given["bias"], given["c"], None, given["alpha"], activation, config)
    made = d.clone()
    d.fill_(POISON)
    assert (around == POISON).all(), "written beside the result"
    return made


@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
@pytest.mark.parametrize("scaling", [engine.UNSCALED, *SCALINGS])
def test_candidates_fit_and_fill_a_multiprocessor(scaling, rows, columns, depth):
    found = candidates(rows, columns, depth, *([] if scaling == engine.UNSCALED else [int(scaling)]))
    assert 0 < len(found) <= 16
    kilobytes = 1 if scaling == engine.UNSCALED else 2  # of weights in a stage of a warp
    for config in found:
        assert config.tokens >= rows
        assert config.ctas * engine.shared_bytes(config, scaling) <= 228 << 10
        assert config.warps * config.ctas * (config.stages - 1) * kilobytes >= 48, "KB of weights on their way"
        assert config.split == 1 or columns < 132 * 16


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("at most 16", {"a": torch.zeros(17, 64, dtype=bf16)}),
        ("along K", {"b": torch.zeros(64, 128, dtype=bf16)}),
        ("along K", {"a": torch.zeros(64, 8, dtype=bf16).T}),
        ("bf16 or fp16", {"a": torch.zeros(8, 64), "b": torch.zeros(128, 64).T}),
        ("16 bytes", {"a": torch.zeros(8, 63, dtype=bf16), "b": torch.zeros(128, 63, dtype=bf16).T}),
    ],
)
def test_what_it_cannot_do_is_said(words, change):
    given = {"a": torch.zeros(8, 64, dtype=bf16), "b": torch.zeros(128, 64, dtype=bf16).T}
    assert engine.refusal(*given.values(), None, None, None, 1.0, "", bf16) is None
    assert words in str(engine.refusal(*{**given, **change}.values(), None, None, None, 1.0, "", bf16))


def test_sums_beside_the_rings_count():
    """One stage more, of which the rings alone would fit, is refused."""
    rows, columns, depth, _, fits, *_ = SCALED["one row"]
    deeper = fits._replace(stages=fits.stages + 1)
    a, b = torch.zeros(1, rows, depth).to(FP8), torch.zeros(1, columns, depth).to(FP8).mT
    scales = [
        layout.empty(size, depth, torch.device("cpu"), 1)
        for layout, size in zip(Scaling.TOKEN_TOKEN.layouts, (rows, columns), strict=True)
    ]
    assert engine.ring_bytes(deeper, Scaling.TOKEN_TOKEN) <= 232448 < engine.shared_bytes(deeper, Scaling.TOKEN_TOKEN)
    assert engine.shared_bytes(fits, Scaling.TOKEN_TOKEN) <= 228 << 10
    with pytest.raises(InputError, match="take fewer stages or warps"):
        run(deeper, a, b, scales=scales)


def test_every_tile_of_every_product_is_a_block_or_a_cluster(monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "KERNEL", lambda *args, **options: calls.append((*args, options)))
    a, b = torch.zeros(3, 20, 320, dtype=bf16), torch.zeros(3, 200, 320, dtype=bf16).mT
    engine.gemm(torch.zeros(3, 20, 200, dtype=bf16), a, b, None, None, None, 1.0, "", Config(16, 4, 8, 2, 1))
    ((grid, args, _, options),) = calls
    assert grid == (3 * 2 * 13 * 2,)
    assert options == {"block": 128, "shared_bytes": 4 * 8 * 4 * 512, "cluster": (2, 1, 1)}
    assert args[6:10] == (200 * 320, 320, 20 * 320, 320)


INSTANCES = [
    (config, ACTIVATIONS[n % 5], (bf16, fp16)[n % 2], (bf16, fp32, fp16)[n % 3], (bf16, fp32)[n % 2])
    for n, config in enumerate((*candidates(8, 576, 7168), *candidates(16, 576, 7168)))
]


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(("config", "activation", "element", "out", "bias"), INSTANCES)
def test_instances_use_the_matrix_units_and_spill_nothing(config, activation, element, out, bias):
    a, b = torch.zeros(1, 8, 2048, dtype=element), torch.zeros(1, 512, 2048, dtype=element).mT
    d = torch.empty(1, 8, columns_out(512, activation), dtype=out)
    terms = torch.zeros(512, dtype=bias), torch.zeros(d.shape)
    with collect("sm_90") as collector:
        engine.gemm(d, a, b, *terms, None, 1.0, activation, config)
    (job,) = collector.jobs
    info = job.compile().info
    assert info["stack_bytes"] == info["spill_stores"] == 0
    assert info["instructions"]["HMMA"] == 2 * config.stages * config.tokens // 8
    assert info["registers"] * 32 * config.warps * config.ctas <= 65536
    assert info["shared_bytes"] + engine.ring_bytes(config) + 1024 == engine.shared_bytes(config)
    assert info["warnings"] == []


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_instances_use_the_matrix_units_and_spill_nothing(scaling, rows):
    for n, config in enumerate(candidates(rows, 576, 7168, int(scaling))[:6]):
        activation, out = ACTIVATIONS[n % 5], (bf16, fp32, fp16)[n % 3]
        a, b = torch.zeros(1, 8, 2048).to(FP8), torch.zeros(1, 512, 2048).to(FP8).mT
        scales = [
            layout.empty(size, 2048, torch.device("cpu"), 1)
            for layout, size in zip(scaling.layouts, (8, 512), strict=True)
        ]
        d = torch.empty(1, 8, columns_out(512, activation), dtype=out)
        with collect("sm_90") as collector:
            engine.scaled(d, a, b, *scales, torch.zeros(512), None, 1.0, activation, config)
        (job,) = collector.jobs
        info = job.compile().info
        assert info["stack_bytes"] == info["spill_stores"] == 0
        assert info["instructions"]["HMMA"] == 8 * config.stages * config.tokens // 8, "e4m3 are two 16-bit products"
        assert info["registers"] * 32 * config.warps * config.ctas <= 65536
        assert info["shared_bytes"] + engine.ring_bytes(config, scaling) + 1024 == engine.shared_bytes(config, scaling)
        assert info["warnings"] == []


COMPUTED = {  # rows, columns, depth, batch, config, activation, element, out
    "one row": (1, 2112, 7168, 1, Config(8, 16, 8, 1, 1), "", bf16, bf16),
    "eight rows, a cluster": (8, 576, 7168, 1, Config(8, 8, 8, 4, 2), "", bf16, bf16),
    "ragged everything": (13, 203, 328, 1, Config(16, 4, 4, 2, 4), "gelu", bf16, fp32),
    "sixteen rows": (16, 4096, 4096, 1, Config(16, 16, 4, 1, 1), "silu", fp16, fp16),
    "gated": (5, 1024, 4096, 1, Config(8, 8, 4, 1, 4), "swiglu", bf16, bf16),
    "fewer chunks than warps": (3, 64, 72, 1, Config(8, 16, 8, 2, 1), "", bf16, bf16),
    "many tiles": (2, 40000, 512, 1, Config(8, 4, 8, 1, 4), "relu", bf16, bf16),
    "a batch": (7, 200, 640, 5, Config(8, 4, 8, 1, 4), "", bf16, bf16),
    "more rows than tokens": (29, 320, 512, 2, Config(8, 8, 8, 1, 2), "", bf16, bf16),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case):
    rows, columns, depth, batch, config, activation, element, out = COMPUTED[case]
    a, b = operands(rows, columns, depth, "nt", element, "cuda", lead=(batch,), magnitudes=8)
    c = torch.randn(batch, rows, columns_out(columns, activation), device="cuda")
    terms = {"bias": torch.randn(columns, device="cuda"), "c": c, "alpha": 0.75}
    made = run(config, a, b, activation, out, **terms)
    check(made, a, b, **terms, activation=activation or None)
    for _ in range(20):
        assert torch.equal(run(config, a, b, activation, out, **terms), made), "the same bits every time"


SCALED = {  # rows, columns, depth, batch, config, activation, out
    "one row": (1, 2112, 7168, 1, Config(8, 16, 3, 1, 1), "", bf16),
    "eight rows, a cluster": (8, 576, 7168, 1, Config(8, 8, 4, 4, 2), "", bf16),
    "ragged everything": (13, 208, 336, 1, Config(16, 4, 3, 2, 2), "gelu", fp32),
    "gated": (16, 1040, 4096, 1, Config(16, 8, 3, 1, 2), "swiglu", bf16),
    "fewer steps than warps": (3, 64, 144, 1, Config(8, 8, 4, 2, 1), "", bf16),
    "a batch, and more rows than tokens": (29, 208, 640, 3, Config(8, 4, 4, 1, 4), "", bf16),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("pair", scaled_problems.PAIRS)
@pytest.mark.parametrize("case", SCALED)
def test_scaled_results(case, pair):
    rows, columns, depth, batch, config, activation, out = SCALED[case]
    problem = scaled_problems.operands(rows, columns, depth, pair, (batch,), "cuda")
    c = torch.randn(batch, rows, columns_out(columns, activation), device="cuda")
    bias, scales = torch.randn(columns, device="cuda"), (problem.scale_a, problem.scale_b)
    made = run(config, problem.a, problem.b, activation, out, scales=scales, bias=bias, c=c, alpha=0.75)
    exact, (x, y) = problem.exact(bias, c, 0.75, activation), problem.dequantised()
    z = (0.75 * (x @ y) + bias).abs().max()
    off = 2e-6 * depth**0.5 * (x.abs() @ y.abs()).max() * (2.5 * z if activation == "swiglu" else 1.13)  # float32 sums
    rounding = {bf16: 2**-8, fp32: 2**-22}[out]
    assert ((made.double() - exact).abs() <= rounding * exact.abs() + off).all()
    for _ in range(20):
        again = run(config, problem.a, problem.b, activation, out, scales=scales, bias=bias, c=c, alpha=0.75)
        assert torch.equal(again, made), "the same bits every time"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_nan_reaches_its_column_and_its_row_alone():
    a, b = operands(5, 72, 600, "nt", bf16, "cuda", lead=(1,))
    b[0, 599, 71] = a[0, 4, 0] = torch.nan
    wrong = run(Config(8, 4, 8, 1, 4), a, b).isnan()
    assert bool(wrong[0, :, 71].all()) and bool(wrong[0, 4].all()) and int(wrong.sum()) == 5 + 72 - 1
