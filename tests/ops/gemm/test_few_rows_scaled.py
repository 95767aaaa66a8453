"""Few rows of e4m3 with scales: what is chosen, refused, launched and compiled; on a Hopper GPU, what is computed."""

import pytest
import torch
from tests.ops.gemm.test_few_rows import ROWS, SHAPES, worst_tile

from tilewright.errors import InputError
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, nvrtc
from tilewright.ops.gemm.kernels.sm90 import few_rows_launch as launch
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90 import few_rows_scaled as scaled
from tilewright.ops.gemm.kernels.sm90.few_rows_model import Work, predicted_us
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out
from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulArgs, plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of

bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
KNOWN = [s for s in Scaling if s is not Scaling.OTHER]


def bucket(rows, columns, depth, scaling):
    return ScaledBucket(rows, columns, depth, 0, 1, 16, 0, int(scaling))


def deepest(tokens, split, ctas, scaling):
    config = model.deepest(tokens, split, ctas, scaling)
    assert config is not None
    return config


def scales(layout, rows, depth, batch, device, generator):
    """Of every power of two from 1/16 to 16, and between: the scale of a neighbour is a wrong one."""
    made = layout.empty(rows, depth, device, batch)
    return made.copy_(torch.exp2(torch.rand(made.shape, generator=generator, device=device) * 8 - 4))


def operands(rows, columns, depth, scaling, batch=1, groups=None, device="cpu", seed=0):
    """a (batch, M, K), b (batch or groups, K, N), both along K, and their scales."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = batch if groups is None else groups
    a, w = (
        torch.randn(n, size, depth, generator=generator, device=device).to(fp8)
        for n, size in ((batch, rows), (groups, columns))
    )
    of_a, of_b = scaling.layouts
    scale_a = scales(of_a, rows, depth, batch, device, generator)
    return a, w.mT, scale_a, scales(of_b, columns, depth, groups, device, generator)


def dequantised(q, of_q, layout):
    """q (..., rows, depth) times its scales, in float64."""
    for dim, block in ((-2, layout.rows), (-1, layout.depth)):
        size = q.shape[dim]
        of_q = of_q.repeat_interleave(block or size, dim).narrow(dim, 0, size)
    return q.double() * of_q.double()


def run(config, a, b, scale_a, scale_b, activation="", out_dtype=bf16, bias=None, c=None, alpha=1.0):
    d = torch.empty(*a.shape[:2], columns_out(b.shape[-1], activation), dtype=out_dtype, device=a.device)
    scaled.gemm(d, ScaledMatmulArgs(a, b, scale_a, scale_b, bias, c, alpha, activation, out_dtype), config)
    return d


# ----------------------------------------------------------------------------------------------- what it chooses


@pytest.mark.parametrize("scaling", KNOWN)
@pytest.mark.parametrize("rows", ROWS)
def test_choices_are_listed_and_fit_shared_memory(rows, scaling):
    for columns, depth in SHAPES:
        config = scaled.configure(bucket(rows, columns, depth, scaling), fp8)
        assert config in scaled.CONFIGS
        found = scaled.candidates(bucket(rows, columns, depth, scaling), fp8)
        assert 4 <= len(set(found)) == len(found) <= 24
        for candidate in (config, *found):
            assert candidate.tokens >= rows
            assert candidate.split <= -(-depth // 256), "every block of a cluster has a stage"
            assert model.shared_bytes(candidate, scaling) <= model.SHARED[candidate.ctas]


def test_scales_of_128_rows_take_room_from_the_ring():
    plain, tokens, both = (deepest(8, 1, 1, s).stages for s in (Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN))
    assert plain >= tokens >= both
    assert deepest(64, 1, 1, Scaling.ROW).stages == model.deepest(64, 1, 1).stages


def test_half_the_bytes_are_half_the_predicted_time():
    config = deepest(8, 2, 1, Scaling.TENSOR)
    narrow, wide = (predicted_us(config, Work(1, 8192, 8192, s)) for s in (Scaling.TENSOR, model.UNSCALED))
    assert narrow == pytest.approx(wide / 2, rel=0.1)


def test_tiles_that_fill_the_machine_are_not_split():
    """What measured best: blocks that meet, and a second round of clusters, cost more than a few idle processors."""

    def split(rows, columns, depth):
        return scaled.configure(bucket(rows, columns, depth, Scaling.TOKEN_BLOCK), fp8).split

    assert [split(rows, 24576, 1536) for rows in (1, 16, 64)] == [1, 1, 1]
    assert split(64, 7168, 2048) == 1, "112 tiles of 8 stages: two blocks each took 9.3 us, one 6.7"
    assert split(64, 576, 7168) == 8, "9 tiles"


# ----------------------------------------------------------------------------------------------- what it refuses


def changed(position, change):
    def altered(arguments):
        arguments = [*arguments]
        arguments[position] = change(arguments[position])
        return arguments

    return altered


REFUSED = {
    "rows": ("at most 64", changed(0, lambda a: a.new_zeros(65, 256))),
    "16-bit operands": ("e4m3", changed(0, lambda a: a.to(bf16))),
    "tokens along M": ("along K", changed(0, lambda a: a.T.contiguous().T)),
    "weights along N": ("along K", changed(1, lambda b: b.contiguous())),
    "other scales": ("Scaling", changed(3, lambda s: s.new_ones(7, 3))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(case, hopper):
    words, change = REFUSED[case]
    arguments = [t[0] for t in operands(8, 256, 256, Scaling.TOKEN_BLOCK)]
    assert scaled.why_not(plain_scaled_args(*arguments, bf16)) is None
    reason = scaled.why_not(plain_scaled_args(*change(arguments), bf16))
    assert reason is not None
    assert words in reason


def test_results_and_addends_of_other_types_are_refused(hopper):
    arguments = [t[0] for t in operands(8, 256, 256, Scaling.ROW)]
    assert "fp32" in str(scaled.why_not(plain_scaled_args(*arguments, fp8)))
    bias = torch.zeros(256, dtype=torch.float64)
    assert "fp32" in str(scaled.why_not(plain_scaled_args(*arguments, bf16)._replace(bias=bias)))


# ----------------------------------------------------------------------------------------------- what it launches


@pytest.fixture
def launched(monkeypatch):
    """(maps, calls): what the kernel and the tensor maps are given."""
    maps, calls = [], []
    monkeypatch.setattr(launch, "tensor_map", lambda t, box, **_: maps.append((tuple(t.shape), box)) or len(maps))
    monkeypatch.setattr(launch, "usable_sms", lambda _: 132)
    monkeypatch.setattr(scaled, "KERNEL", lambda *args, **options: calls.append((*args, options)))
    return maps, calls


def test_only_scales_of_128_of_k_have_maps(launched):
    maps, calls = launched
    expected = {Scaling.TENSOR: 2, Scaling.ROW: 2, Scaling.TOKEN_BLOCK: 3, Scaling.TOKEN_TOKEN: 4}
    for scaling, count in expected.items():
        maps.clear()
        run(deepest(8, 2, 1, scaling), *operands(3, 200, 640, scaling))
        assert len(maps) == count
        assert maps[:2] == [((1, 200, 640), (1, 64, 128)), ((1, 3, 640), (1, 3, 128))]
        assert calls[-1][2].kScaling == scaling
    assert maps[2:] == [((1, 5, 3), (1, 2, 8)), ((1, 5, 200), (1, 2, 64))]


def test_scales_are_passed_with_their_strides(launched):
    a, b, scale_a, scale_b = operands(4, 300, 640, Scaling.TOKEN_BLOCK, batch=2)
    run(deepest(8, 1, 1, Scaling.TOKEN_BLOCK), a, b, scale_a, scale_b)
    (_, args, _, options) = launched[1][0]
    assert args.scale_a is scale_a and args.scale_b is scale_b
    assert (args.scale_a_batch, args.scale_b_batch, args.scale_b_row) == (20, 15, 5), (
        "a batch of scales of a, of b, a row of those of b"
    )
    assert options["shared_bytes"] == model.shared_bytes(deepest(8, 1, 1, Scaling.TOKEN_BLOCK), Scaling.TOKEN_BLOCK)


def test_a_stage_is_256_of_k(launched):
    arguments = operands(4, 128, 512, Scaling.ROW)
    run(deepest(8, 2, 1, Scaling.ROW), *arguments)
    with pytest.raises(InputError, match="K=512 has 2 steps of 256"):
        run(deepest(8, 3, 1, Scaling.ROW), *arguments)


# ----------------------------------------------------------------------------------------------- what it compiles

needs_nvrtc = pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
INSTANCES = [
    (config, KNOWN[n % 4], ACTIVATIONS[n % 5], (bf16, fp32, fp16)[n % 3])
    for n, config in enumerate((*scaled.CONFIGS[::5], deepest(64, 1, 1, 3), deepest(64, 2, 2, 3)))
]


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("config", "scaling", "activation", "out"), INSTANCES)
def test_promotion_spills_nothing_and_serialises_nothing(config, scaling, activation, out):
    config = deepest(config.tokens, config.split, config.ctas, scaling)
    with collect("sm_90") as collector:
        run(config, *operands(min(8, config.tokens), 512, 4096, scaling), activation, out, bias=torch.zeros(512))
    (job,) = collector.jobs
    info = job.compile().info
    assert info["stack_bytes"] == info["spill_stores"] == 0
    assert not info["instructions"].keys() & {"LDL", "STL"}
    assert info["instructions"]["QGMMA"] == 16, (
        "four for 128 of K: first, second, last, and the first of the next stage"
    )
    assert info["instructions"]["UTMALDG"] == 4 + (scaling >= Scaling.TOKEN_BLOCK) + (scaling == Scaling.TOKEN_TOKEN)
    assert info["warnings"] == []


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("scaling", KNOWN)
def test_host_and_kernel_agree_on_shared_memory(scaling, monkeypatch):
    config = deepest(24, 2, 1, scaling)
    params = scaled.Params(*config, False, 0, int(scaling), fp8, bf16, bf16, bf16)
    text = scaled.KERNEL.source(params)

    def compile_claiming(size):
        barriers = 16 * (1 + config.stages)
        claim = (
            f"static_assert(tilewright::Layout<tilewright::Batched<Config>>::kBarriersOffset + {barriers} == {size});\n"
        )
        monkeypatch.setattr(scaled.KERNEL, "source", lambda _: text + claim)
        scaled.KERNEL.compile(params, "sm_90")

    compile_claiming(model.shared_bytes(config, scaling))
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_claiming(model.shared_bytes(config, scaling) + 8)


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED = {  # rows, columns, depth, batch, (tokens, split, ctas), activation, out
    "half a stage": (1, 64, 128, 1, (8, 1, 1), "", fp32),
    "one token, six blocks": (1, 2112, 7168, 1, (8, 6, 1), "", bf16),
    "ragged everything": (13, 200, 1040, 1, (16, 2, 2), "gelu", fp32),
    "gated, eight blocks": (33, 1024, 4096, 1, (64, 8, 1), "swiglu", bf16),
    "many tiles a cluster": (5, 40000, 512, 1, (8, 2, 1), "relu", bf16),
    "more rows than tokens, a batch": (61, 320, 512, 2, (16, 1, 2), "silu", fp16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", KNOWN)
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case, scaling):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    rows, columns, depth, batch, sizes, activation, out = COMPUTED[case]
    a, b, scale_a, scale_b = operands(rows, columns, depth, scaling, batch, device="cuda")
    assert scaling_of(a, b, scale_a, scale_b) <= scaling
    bias = torch.randn(columns, device="cuda")
    c = torch.randn(batch, rows, columns_out(columns, activation), device="cuda").to(bf16)
    options = {"bias": bias, "c": c, "alpha": depth**-0.5}
    d = run(deepest(*sizes, scaling), a, b, scale_a, scale_b, activation, out, **options)
    of_a, of_b = scaling.layouts
    sums = dequantised(a, scale_a, of_a) @ dequantised(b.mT, scale_b, of_b).mT
    exact = apply_epilogue(depth**-0.5 * sums, bias, c, activation, torch.float64)
    assert worst_tile(d, exact) < {bf16: 4e-3, fp16: 2e-3, fp32: 1e-3}[out]
    for _ in range(20):
        again = run(deepest(*sizes, scaling), a, b, scale_a, scale_b, activation, out, **options)
        assert torch.equal(d, again), "the same bits every time"
