"""The kernel for scaled e4m3 operands: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

import pytest
import torch

from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.gemm.kernels.sm90 import fp8 as engine
from tilewright.ops.gemm.kernels.sm90 import fp8_kernel
from tilewright.ops.gemm.kernels.sm90.dense_kernel import GemmType, Groups
from tilewright.ops.gemm.kernels.sm90.fp8_cost_model import Problem, Tile
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs, ScaledMatmulFp8Args, plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast, spread

fp8, bf16, fp16, fp32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
SHARED_LIMIT = 232448  # bytes a block may have on sm_90, 1 KB of it for barriers


def operands(rows, columns, depth, scaling=Scaling.TOKEN_BLOCK, batch=1, device="cpu", seed=0):
    """a, b, scale_a, scale_b as `gemm` takes them; scales are log-uniform, and NaN where there are none."""
    generator = torch.Generator(device).manual_seed(seed)

    def quantised(*shape):
        return (60 * torch.randn(*shape, generator=generator, device=device)).clamp(-448, 448).to(fp8)

    def scales(layout, size):
        made = layout.empty(size, depth, device, batch)
        made.as_strided((made.untyped_storage().nbytes() // 4,), (1,)).fill_(torch.nan)
        return made.copy_(10 ** (2 * torch.rand(made.shape, generator=generator, device=device) - 4))

    of_a, of_b = scaling.layouts
    a, b = quantised(batch, rows, depth), quantised(batch, columns, depth).mT
    return a, b, scales(of_a, rows), scales(of_b, columns)


def made(block_m, block_n, scaling=Scaling.TOKEN_BLOCK):
    """The config of a tile as the engine makes it."""
    return engine.config_of(Tile(block_m, block_n), Problem(1, 1, 1, scaling=scaling))


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "bf16": ("float8_e4m3fn", lambda a, b, sa, sb: (a.to(bf16), b, sa, sb, None)),
    "a along M": ("along K", lambda a, b, sa, sb: (a.mT.contiguous().mT, b, sa, sb, None)),
    "b along N": ("along K", lambda a, b, sa, sb: (a, b.contiguous(), sa, sb, None)),
    "scales of rows and blocks": ("Scaling", lambda a, b, sa, sb: (a, b, sa[..., :1], sb, None)),
    "odd K": ("16 bytes", lambda a, b, sa, sb: (a[..., :248], b[:, :248], sa, sb, None)),
    "fp64 bias": ("bf16, fp16 or fp32", lambda a, b, sa, sb: (a, b, sa, sb, torch.zeros(384, dtype=torch.float64))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(case, hopper):
    words, change = REFUSED[case]
    given = operands(64, 384, 256)
    assert engine.why_not(plain_scaled_args(*given, bf16)) is None
    a, b, sa, sb, bias = change(*given)
    if case == "odd K":  # strides of 248 bytes
        a, b = a.contiguous(), b.mT.contiguous().mT
    reason = engine.why_not(plain_scaled_args(a, b, sa, sb, bf16)._replace(bias=bias))
    assert reason is not None
    assert words in reason


def test_results_in_fp8_have_rows_of_16_bytes(hopper):
    def why_not(given, activation=""):
        return engine.why_not_fp8(ScaledMatmulFp8Args(*given, None, 1.0, activation))

    given = operands(64, 40, 256)
    assert engine.why_not(plain_scaled_args(*given, bf16)) is None
    assert "16 columns" in str(why_not(given))
    assert why_not(operands(64, 96, 256)) is None
    assert "16 columns" in str(why_not(operands(64, 48, 256), "swiglu"))


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernel and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls, self.processors = [], [], 132
        monkeypatch.setattr(
            fp8_kernel, "tensor_map", lambda t, box, swizzle=0: self.maps.append((tuple(t.shape), box, swizzle))
        )
        monkeypatch.setattr(fp8_kernel, "usable_sms", lambda _: self.processors)
        monkeypatch.setattr(fp8_kernel, "KERNEL", lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def run(config, given, activation="", out_dtype=bf16, bias=None, c=None, alpha=1.0):
    a, b = given[:2]
    d = torch.empty(a.shape[0], a.shape[1], columns_out(b.shape[-1], activation), dtype=out_dtype, device=a.device)
    engine.gemm(d, ScaledMatmulArgs(*given, bias, c, alpha, activation, out_dtype), config)
    return d


def run_fp8(config, given, activation="", bias=None, alpha=1.0):
    a, b = given[:2]
    n_out = columns_out(b.shape[-1], activation)
    q = torch.empty(a.shape[0], a.shape[1], n_out, dtype=fp8, device=a.device)
    scales = TOKEN.empty(a.shape[1], n_out, a.device, a.shape[0])
    engine.gemm_fp8(q, scales, ScaledMatmulArgs(*given, bias, None, alpha, activation, fp8), config)
    return q, scales


def test_a_stage_is_a_copy_of_each_operand_and_of_the_scales_of_rows(launches):
    run(made(192, 128), operands(600, 520, 384))
    assert launches.maps == [
        ((1, 600, 384), (1, 192, 128), 128),
        ((1, 520, 384), (1, 128, 128), 128),
        ((1, 600, 520), (1, 64, 64), 128),
        ((1, 3, 600), (1, 1, 192), 0),
    ]
    (grid, args, params, options) = launches.calls[0]
    assert grid == (4 * 5,)
    assert options["block"] == 512
    assert (args.scale_b_pitch, args.scale_b_batch) == (3, 5 * 3), (
        "of block scales: from 128 columns to the next, from matrix to matrix"
    )
    assert (args.m, args.n, args.k, args.batches) == (600, 520, 384, 1)
    assert (params.kScaling, params.kBlockM, params.kBlockN, params.kStages) == (2, 192, 128, 4)


def test_stages_hold_the_scales_of_their_tile():
    def floats(config, scaling):
        config = config._replace(stages=1)
        return (engine.shared_bytes(config, scaling) - engine.shared_bytes(config, Scaling.ROW)) // 4

    line = 32  # floats that begin where copies may
    assert floats(made(192, 128), Scaling.TOKEN_BLOCK) == 192 + line + line, "rows before the tile, blocks of columns"
    assert floats(made(128, 256), Scaling.TOKEN_BLOCK) == 128 + line + line
    assert floats(made(256, 128), Scaling.TOKEN_BLOCK) == 2 * (128 + line) + line, "a copy has at most 256 rows"
    assert floats(made(128, 96), Scaling.TOKEN_TOKEN) == 128 + line + 96
    assert floats(made(128, 192), Scaling.TENSOR) == 0


def test_groups_begin_at_any_row_and_copies_of_scales_at_multiples_of_four(launches):
    given = operands(600, 256, 384)
    d, groups = torch.empty(1, 600, 256, dtype=bf16), Groups(GemmType.GROUPED_M, 1, ends=torch.tensor([600]))
    engine.gemm(d, plain_scaled_args(*given, bf16), made(256, 128), groups)
    assert launches.maps[3] == ((1, 3, 600), (1, 1, 128 + 4), 0), "in two halves"


def test_a_result_in_place_is_added_by_the_copy_engine(launches):
    given = operands(128, 128, 128, Scaling.TOKEN_TOKEN)
    d = torch.zeros(1, 128, 128)
    args = plain_scaled_args(*given, fp32)
    engine.gemm(d, args._replace(c=d), made(128, 128, 3))
    assert launches.calls[-1][2].kAccumulate
    engine.gemm(d, args._replace(c=d.clone()), made(128, 128, 3))
    assert not launches.calls[-1][2].kAccumulate
    assert launches.calls[-1][2].kAddend == 2
    half = torch.zeros(1, 128, 128, dtype=bf16)
    engine.gemm(half, args._replace(c=half, out_dtype=bf16), made(128, 128, 3))
    assert not launches.calls[-1][2].kAccumulate, "sums in bf16 would be rounded twice"


def test_a_result_in_fp8_leaves_in_strips_of_128_bytes_beside_its_scales(launches):
    given = operands(300, 544, 384)
    run_fp8(made(128, 256), given, "swiglu")
    assert launches.maps[2] == ((1, 300, 272), (1, 64, 128), 128)
    args = launches.calls[0][1]
    assert args.direct.shape == (1, 300, 3)
    assert (args.direct_pitch, args.direct_batch) == (300, 900)


def test_no_more_blocks_than_multiprocessors(launches):
    launches.processors = 131
    run(made(128, 192), operands(4096, 4096, 128))
    run(made(128, 192), operands(256, 192, 128))
    assert [call[0] for call in launches.calls] == [(131,), (2,)]


# ----------------------------------------------------------------------------------------------- what it compiles


@pytest.mark.parametrize("scaling", range(4))
def test_every_config_fits_shared_memory(scaling):
    problems = [Problem(1, 1, 1, out_bytes, scaling=scaling) for out_bytes in (1, 2)]
    for tile in {tile for problem in problems for tile in engine._legal(problem)}:
        config = engine.config_of(tile, Problem(1, 1, 1, scaling=scaling))
        assert config in (*engine.CONFIGS, *engine.CONFIGS_FP8)
        assert engine.shared_bytes(config, scaling) + 1024 <= SHARED_LIMIT
        assert config.stages >= 3
        spare = SHARED_LIMIT - 1024 - engine.shared_bytes(config, scaling)
        one_more = engine.shared_bytes(config._replace(stages=1), scaling) - engine.shared_bytes(
            config._replace(stages=0), scaling
        )
        assert config.stages == 8 or spare < one_more, "a deeper ring would fit"


def test_configs_of_fp8_results_are_whole_blocks_of_scales():
    assert {config.block_n for config in engine.CONFIGS_FP8} == {128, 256}
    assert {config.block_m for config in engine.CONFIGS_FP8} == {64, 128, 256}


OPTIONS = (  # activation, Out, Bias, C
    ("", bf16, None, None),
    ("gelu", fp16, bf16, bf16),
    ("swiglu", bf16, fp32, fp32),
    ("", fp32, None, fp32),  # compiled twice: c may be the result
    ("silu", fp8, bf16, None),
)
INSTANCES = [
    (made(*tile[:2], scaling), scaling, OPTIONS[(n + scaling) % len(OPTIONS)])
    for scaling in range(4)
    for n, tile in enumerate(engine._legal(Problem(1, 1, 1, scaling=scaling)))
] + [
    (made(128, 256), 2, ("swiglu", fp8, bf16, None)),
    (made(256, 128), 2, ("gelu", fp8, bf16, None)),
    (made(64, 256), 1, ("swiglu", fp8, None, None)),
]


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(("config", "scaling", "options"), INSTANCES)
def test_instances_use_the_matrix_units_and_spill_nothing(config, scaling, options):
    activation, out, bias, c = options
    if out == fp8 and config not in engine.CONFIGS_FP8 and activation != "swiglu":
        out = bf16
    gated = [(tile.block_m, tile.block_n) for tile in engine._legal(Problem(1, 1, 1, gated=True, scaling=scaling))]
    if activation == "swiglu" and out != fp8 and (config.block_m, config.block_n) not in gated:
        activation = "relu"
    given = operands(8, 512, 256, Scaling(scaling))
    bias = None if bias is None else torch.zeros(512, dtype=bias)
    with collect("sm_90") as collector:
        if out == fp8:
            run_fp8(config, given, activation, bias)
        else:
            c = None if c is None else torch.zeros(1, 8, columns_out(512, activation), dtype=c)
            run(config, given, activation, out, bias, c)
    assert len(collector.jobs) == (2 if c is not None and c.dtype == out == fp32 else 1)
    products = 4 * (2 if max(config.block_m, config.block_n) > 192 else 1)  # of 32 of K, for a step of 128
    for job in collector.jobs:
        info = job.compile().info
        assert info["stack_bytes"] == info["spill_stores"] == 0
        assert not info["instructions"].keys() & {"LDL", "STL"}
        assert info["instructions"]["QGMMA"] % products == 0
        if scaling != Scaling.TOKEN_TOKEN or config.block_m < 256:  # which has no registers for more
            assert info["instructions"]["QGMMA"] >= 5 * products, "the loop is unrolled, and its rest is not"
        assert info["shared_bytes"] <= 1024
        assert info["warnings"] == []


# ----------------------------------------------------------------------------------------------- what it computes


def exact(given, bias, c, alpha, activation):
    """The product of the dequantised operands in float64, and the sum of magnitudes that its error is measured by."""
    a, b, sa, sb = given
    of_a, of_b = next(
        s.layouts
        for s in list(Scaling)[:4]
        if s.layouts[0].shape(*a.shape[1:]) == tuple(sa.shape[1:])
        and s.layouts[1].shape(*b.mT.shape[1:]) == tuple(sb.shape[1:])
    )
    x = a.double() * spread(sa.double(), of_a, *a.shape[1:])
    y = b.mT.double() * spread(sb.double(), of_b, *b.mT.shape[1:])
    return apply_epilogue(alpha * x @ y.mT, bias, c, activation, torch.float64)


COMPUTED = {  # rows, columns, depth, batch, scaling, config, activation, out
    "one tile": (192, 128, 256, 1, 2, made(192, 128), "", bf16),
    "ragged everything": (1001, 1032, 1168, 1, 2, made(192, 128), "gelu", bf16),
    "two blocks of scales a tile": (1001, 1160, 1168, 1, 2, made(128, 192), "", fp32),
    "three quarters of a block": (1001, 1160, 1168, 1, 2, made(128, 96), "", fp16),
    "one step": (300, 264, 128, 1, 2, made(128, 128), "", bf16),
    "seven steps": (300, 264, 896, 3, 2, made(128, 128), "", bf16),
    "two waves of rows": (1001, 1032, 1168, 2, 2, made(256, 128), "gelu", fp32),
    "three warpgroups": (700, 1296, 912, 1, 2, made(192, 96), "swiglu", bf16),
    "many tiles": (2000, 2048, 1152, 1, 2, made(192, 128), "", bf16),
    "tensor scales": (1001, 1032, 1168, 2, 0, made(192, 128), "relu", bf16),
    "row scales": (1001, 1032, 1168, 2, 1, made(192, 128), "silu", bf16),
    "token by token": (1001, 1032, 1168, 1, 3, made(192, 128, 3), "", fp32),
    "token by token, two waves": (1001, 1032, 1168, 2, 3, made(256, 128, 3), "gelu", bf16),
    "112 columns": (1001, 1032, 1168, 1, 3, made(256, 112, 3), "", fp32),
    "96 columns": (700, 1056, 1152, 1, 3, made(256, 96, 3), "swiglu", fp16),
    "few rows": (13, 520, 2048, 1, 2, made(64, 32), "", bf16),
}


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case):
    on_hopper()
    rows, columns, depth, batch, scaling, config, activation, out = COMPUTED[case]
    given = operands(rows, columns, depth, Scaling(scaling), batch, "cuda")
    bias = torch.randn(columns, device="cuda")
    c = torch.randn(batch, rows, columns_out(columns, activation), device="cuda").to(bf16)
    found = run(config, given, activation, out, bias, c, depth**-0.5)
    wanted = exact(given, bias, c, depth**-0.5, activation)
    bound = {bf16: 4e-3, fp16: 2e-3, fp32: 2e-3}[out]
    for f, w in zip(found.double().split(64, -1), wanted.split(64, -1), strict=True):
        for tile, right in zip(f.split(64, -2), w.split(64, -2), strict=True):
            assert (tile - right).norm() <= bound * right.norm()
    for _ in range(20):
        assert torch.equal(run(config, given, activation, out, bias, c, depth**-0.5), found), "the same bits every time"


def in_steps(q):
    """e4m3 as integers in the order of its values: neighbours differ by 1, zeros of both signs are 0.

    The float32 epilogue adds 0.0 where there is no c, and so makes 0 of the -0 that silu(-1000) is; the other does not.
    """
    bits = q.view(torch.uint8).to(torch.int16)
    return torch.where(bits > 127, 128 - bits, bits)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [made(64, 256), made(128, 128), made(128, 256), made(256, 128), made(64, 128)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_fp8_result_is_the_cast_of_the_float32_one(config, activation):
    on_hopper()
    if activation == "swiglu" and config.block_n != 256:
        pytest.skip("gated blocks of scales need tiles of 256 columns")
    given = operands(333, 1056, 640, device="cuda")
    bias = torch.randn(1056, device="cuda")
    q, scales = run_fp8(config, given, activation, bias, 30.0)
    exactly = run(config, given, activation, fp32, bias, alpha=30.0)
    wanted_q, wanted_scales = cast(exactly[0], TOKEN)
    torch.testing.assert_close(scales[0], wanted_scales, rtol=1e-6, atol=0.0)
    assert not q.float().isnan().any()
    steps = (in_steps(q[0]) - in_steps(wanted_q)).abs()
    assert steps.max() <= 1, "the last bits of a float32 may decide between neighbours"
    assert (steps > 0).float().mean() < 0.01


@pytest.mark.gpu
def test_accumulation_in_place_adds_once():
    on_hopper()
    given = operands(600, 520, 1024, Scaling.TOKEN_TOKEN, device="cuda")
    config = made(128, 128, 3)
    start = torch.randn(1, 600, 520, device="cuda")
    d = start.clone()
    engine.gemm(d, plain_scaled_args(*given, fp32)._replace(c=d), config)
    product = run(config, given, out_dtype=fp32)
    assert torch.equal(d, start + product)


@pytest.mark.gpu
def test_scales_of_nothing_are_not_read():
    """Columns of K beyond the edge are zeros, and so are their scales: 0 * NaN would be NaN."""
    on_hopper()
    given = operands(65, 136, 144, Scaling.TOKEN_TOKEN, device="cuda")
    assert not run(made(128, 128, 3), given).isnan().any()
