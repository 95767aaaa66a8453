"""The kernel for few rows: what it chooses, refuses, launches and compiles; on a Hopper GPU, what it computes."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, nvrtc
from tilewright.ops.gemm.dense.args import MatmulArgs, MatmulBucket, plain_args
from tilewright.ops.gemm.kernels.sm90 import few_rows as engine
from tilewright.ops.gemm.kernels.sm90 import few_rows_launch as launch
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows import Config, Params
from tilewright.ops.gemm.kernels.sm90.few_rows_model import Work, predicted_us, shared_bytes
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

SHAPES = [  # (N, K): DeepGEMM's list, the projections of Llama 3.1 8B, two heads
    (2112, 7168),
    (576, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (129280, 7168),
    (128256, 4096),
]
ROWS = (1, 2, 8, 16, 32, 64)


def bucket(rows, columns, depth):
    return MatmulBucket(rows, columns, depth, 0, 1, 16, 0)


def deepest(tokens, split, ctas):
    """The config with the deepest ring that shared memory has room for."""
    config = model.deepest(tokens, split, ctas)
    assert config is not None
    return config


def operands(rows, columns, depth, dtype=bf16, layout="nt", batch=1, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    a = make(batch, rows, depth)
    return a, make(batch, columns, depth).mT if layout == "nt" else make(batch, depth, columns)


# ----------------------------------------------------------------------------------------------- what it chooses


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_candidates_are_legal_and_few(rows, columns, depth):
    found = engine.candidates(bucket(rows, columns, depth), bf16)
    assert 4 <= len(found) <= 24
    assert len(set(found)) == len(found)
    for config in found:
        assert config.tokens >= rows
        assert config.stages >= 2
        assert shared_bytes(config) <= model.SHARED[config.ctas]
        assert config.split <= -(-depth // 128), "every block of a cluster has some of K"


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_default_is_a_listed_config_and_keeps_the_memory_busy(rows, columns, depth):
    config = engine.configure(bucket(rows, columns, depth), bf16)
    assert config in engine.CONFIGS
    assert config.ctas * config.stages * 64 * 128 * 2 >= 64 << 10
    blocks = config.split * -(-columns // 64)
    assert blocks >= 66, "half the multiprocessors at least, else their intake is the limit"


def test_few_tiles_are_split_and_short_k_is_not():
    assert engine.configure(bucket(1, 576, 7168), bf16).split == 8, "9 tiles"
    assert engine.configure(bucket(1, 4096, 4096), bf16).split == 2, "64 tiles"
    assert engine.configure(bucket(1, 32768, 512), bf16).split == 1, "512 tiles of four steps: meeting costs more"
    assert engine.configure(bucket(64, 28672, 4096), bf16).split == 1, "448 tiles: 60.8 us, and 62.4 split by two"
    assert engine.configure(bucket(1, 576, 256), bf16).split <= 2, "two steps"


def test_a_prediction_is_never_under_the_time_to_read_the_weights():
    for columns, depth in SHAPES:
        for config in engine.candidates(bucket(1, columns, depth), bf16):
            bytes_of_weights = columns * depth * 2
            assert predicted_us(config, Work(1, columns, depth)) >= 0.8 * bytes_of_weights / model.READ


def test_more_work_is_predicted_to_take_longer():
    config = deepest(64, 2, 1)
    times = [predicted_us(config, Work(1, columns, 4096)) for columns in (64, 1024, 4096, 28672, 128256)]
    assert times == sorted(times)
    assert predicted_us(config, Work(64, 4096, 4096)) > predicted_us(config, Work(1, 4096, 4096))
    assert predicted_us(config, Work(1, 4096, 8192)) > 1.9 * predicted_us(config, Work(1, 4096, 4096)) - 1


def test_clusters_that_run_together_are_those_the_driver_counted():
    assert model.resident(1, 1, 132) == 132
    assert model.resident(2, 1, 132) == 66
    assert model.resident(4, 1, 132) == 30, "120 of 132 multiprocessors"
    assert model.resident(4, 2, 132) == 62
    assert model.resident(4, 3, 132) == 93


@pytest.mark.parametrize("split", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_clusters_never_need_more_than_there_is(split, ctas):
    for processors in (1, 4, 78, 114, 131, 132, 144):
        clusters = model.resident(split, ctas, processors)
        assert clusters == 1 or clusters * split <= processors * ctas
        assert model.resident(split, ctas, 2 * processors) >= clusters >= 1


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "rows": ("at most 64", lambda a, b: (torch.zeros(65, 64, dtype=bf16), b, None)),
    "fp32 operands": ("bf16 or fp16", lambda a, b: (a.float(), b.float(), None)),
    "mixed operands": ("one dtype", lambda a, b: (a, b.half(), None)),
    "tokens along M": ("contiguous along K", lambda a, b: (torch.zeros(64, 8, dtype=bf16).T, b, None)),
    "weights strided both ways": ("along K or N", lambda a, b: (a, torch.zeros(128, 256, dtype=bf16)[::2, ::2], None)),
    "odd K": ("16 bytes", lambda a, b: (a[:, :63].contiguous(), b[:63].T.contiguous().T, None)),
    "fp64 bias": ("bf16, fp16 and fp32", lambda a, b: (a, b, torch.zeros(128, dtype=torch.float64))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(case):
    words, change = REFUSED[case]
    a, b = torch.zeros(8, 64, dtype=bf16), torch.zeros(128, 64, dtype=bf16).T
    assert engine.why_not_operands(plain_args(a, b, bf16)) is None
    a, b, bias = change(a, b)
    reason = engine.why_not_operands(plain_args(a, b, bf16)._replace(bias=bias))
    assert reason is not None
    assert words in reason.replace("bf16, fp16 or fp32", "bf16, fp16 and fp32")


def test_gated_columns_count_half_for_the_alignment_of_the_result():
    a, b = torch.zeros(8, 64, dtype=bf16), torch.zeros(120, 64, dtype=bf16).T
    assert engine.why_not_operands(plain_args(a, b, bf16)) is None
    assert "16 bytes" in str(engine.why_not_operands(plain_args(a, b, bf16, "swiglu")))


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernel and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls, self.processors = [], [], 132
        monkeypatch.setattr(launch, "tensor_map", lambda t, box, **_: self.maps.append((tuple(t.shape), box)))
        monkeypatch.setattr(launch, "usable_sms", lambda _: self.processors)
        monkeypatch.setattr(engine, "KERNEL", lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def run(config, a, b, activation="", out_dtype=bf16, **tensors):
    d = torch.empty(a.shape[0], a.shape[1], columns_out(b.shape[-1], activation), dtype=out_dtype, device=a.device)
    engine.gemm(d, plain_args(a, b, out_dtype, activation)._replace(**tensors), config)
    return d


def test_boxes_hold_the_rows_that_exist(launches):
    a, b = operands(3, 200, 320)
    run(Config(8, 4, 2, 1), a, b)
    assert launches.maps == [((1, 200, 320), (1, 64, 64)), ((1, 3, 320), (1, 3, 64))]
    (grid, args, params, options) = launches.calls[0]
    assert grid == (4 * 2,)
    assert options == {"block": 160, "shared_bytes": shared_bytes(Config(8, 4, 2, 1)), "cluster": (2, 1, 1)}
    assert args[-6:] == (3, 200, 320, 1, 3, True)
    assert not params.kMnMajor


def test_weights_along_n_come_in_boxes_of_64_by_64(launches):
    a, b = operands(8, 256, 128, layout="nn")
    run(Config(8, 4, 1, 1), a, b)
    assert launches.maps[0] == ((1, 128, 256), (1, 64, 64))
    assert launches.calls[0][2].kMnMajor
    assert launches.calls[0][3]["cluster"] is None


@pytest.mark.parametrize(("processors", "clusters"), [(132, 62), (66, 28), (1, 1)])
def test_clusters_are_as_many_as_fit(launches, processors, clusters):
    launches.processors = processors
    a, b = operands(1, 32000, 512)
    run(Config(8, 6, 4, 2), a, b)
    assert launches.calls[0][0] == (4 * clusters,)


def test_more_rows_than_tokens_are_more_tiles(launches):
    a, b = operands(20, 64, 64, batch=3)
    run(Config(8, 6, 1, 2), a, b)
    assert launches.calls[0][0] == (3 * 3,)
    assert launches.maps[1] == ((3, 20, 64), (1, 8, 64))


def test_blocks_without_steps_are_refused(launches):
    a, b = operands(4, 128, 200)
    run(Config(8, 4, 2, 1), a, b)
    with pytest.raises(InputError, match="K=200 has 2 steps"):
        run(Config(8, 4, 3, 1), a, b)
    assert len(launches.calls) == 1


def test_results_that_begin_anywhere_are_stored_one_by_one(launches):
    a, b = operands(4, 64, 64)
    config = Config(8, 6, 1, 2)
    for pitch, vectors in [(64, True), (68, True), (66, False)]:
        d = torch.empty(1, 4, pitch, dtype=bf16)[..., :64]
        engine.gemm(d, plain_args(a, b, bf16), config)
        assert launches.calls[-1][1][-1] is vectors


# ----------------------------------------------------------------------------------------------- what it compiles

INSTANCES = [  # config, N-major weights, activation, Element, Out, Bias, Addend
    (config, n % 2 == 1, ACTIVATIONS[n % 5], (bf16, fp16)[n % 2], (bf16, fp32, fp16)[n % 3], (bf16, fp32)[n % 2], fp32)
    for n, config in enumerate((*engine.CONFIGS[::3], deepest(8, 16, 1), deepest(64, 7, 1), deepest(32, 3, 3)))
]


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(("config", "along_n", "activation", "element", "out", "bias", "addend"), INSTANCES)
def test_instances_use_the_matrix_units_and_spill_nothing(config, along_n, activation, element, out, bias, addend):
    a, b = operands(min(8, config.tokens), 512, 2048, element, "nn" if along_n else "nt")
    with collect("sm_90") as collector:
        run(config, a, b, activation, out, bias=torch.zeros(512, dtype=bias), c=torch.zeros(1, 1, 1, dtype=addend))
    (job,) = collector.jobs
    info = job.compile().info
    assert info["stack_bytes"] == info["spill_stores"] == 0
    assert not info["instructions"].keys() & {"LDL", "STL"}
    assert info["instructions"]["HGMMA"] == 8, "128 of K are eight times 16"
    assert info["registers"] * 160 * config.ctas <= 65536
    assert info["shared_bytes"] == 0, "barriers lie in dynamic shared memory, so that the ring begins at its start"
    assert info["warnings"] == []


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize("config", [engine.CONFIGS[0], engine.CONFIGS[-1], Config(24, 2, 2, 1)])
def test_host_and_kernel_agree_on_shared_memory(config, monkeypatch):
    params = Params(*config, False, 0, bf16, bf16, bf16, bf16)
    text = engine.KERNEL.source(params)
    barriers = 16 * (1 + config.stages)

    def compile_claiming(size):
        offset = "tilewright::Layout<tilewright::Unscaled<Config>>::kBarriersOffset"
        claim = f"static_assert({offset} + {barriers} == {size});\n"
        monkeypatch.setattr(engine.KERNEL, "source", lambda _: text + claim)
        engine.KERNEL.compile(params, "sm_90")

    compile_claiming(shared_bytes(config))
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_claiming(shared_bytes(config) + 8)


# ----------------------------------------------------------------------------------------------- what it computes


def worst_tile(found, exact):
    """The largest relative error, in the Frobenius norm, of a tile of 64 x 64."""
    worst = 0.0
    for batch in range(found.shape[0]):
        for f, e in zip(found[batch].double().split(64, -1), exact[batch].split(64, -1), strict=True):
            worst = max(worst, ((f - e).norm() / e.norm()).nan_to_num(torch.inf).item())
    return worst


COMPUTED = {  # rows, columns, depth, layout, batch, config, activation, element, out
    "one token, four blocks": (1, 2112, 7168, "nt", 1, deepest(8, 4, 2), "", bf16, bf16),
    "ragged everything": (13, 200, 328, "nt", 1, deepest(16, 3, 2), "gelu", bf16, fp32),
    "weights along N": (64, 1000, 520, "nn", 1, deepest(64, 2, 1), "silu", fp16, fp16),
    "gated, eight blocks": (33, 1024, 4096, "nt", 1, deepest(64, 8, 1), "swiglu", bf16, bf16),
    "many tiles a cluster": (5, 40000, 512, "nt", 1, deepest(8, 1, 2), "relu", bf16, bf16),
    "many tiles a cluster of two": (40, 60000, 256, "nn", 1, deepest(64, 2, 2), "", bf16, bf16),
    "one step a block": (8, 128, 1000, "nt", 1, deepest(8, 8, 3), "", bf16, fp32),
    "weights along N, deep ring": (30, 2112, 4096, "nn", 1, deepest(32, 2, 1), "", bf16, bf16),
    "a batch": (7, 192, 640, "nt", 5, deepest(8, 2, 2), "", bf16, bf16),
    "three blocks share eight parcels": (64, 1000, 2048, "nt", 1, deepest(64, 3, 1), "", bf16, bf16),
    "five blocks, three a multiprocessor": (1, 2112, 7168, "nt", 1, deepest(8, 5, 3), "", bf16, bf16),
    "six blocks, two a multiprocessor": (16, 1536, 8960, "nt", 1, deepest(16, 6, 2), "", bf16, bf16),
    "more rows than tokens": (61, 320, 512, "nt", 2, deepest(16, 2, 2), "", bf16, bf16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    rows, columns, depth, layout, batch, config, activation, element, out = COMPUTED[case]
    a, b = operands(rows, columns, depth, element, layout, batch, "cuda")
    d = torch.full((batch, rows, columns_out(columns, activation)), torch.nan, dtype=out, device="cuda")
    bias, c = torch.randn(columns, device="cuda"), torch.randn(d.shape, device="cuda").to(bf16)
    scale = torch.tensor([0.5], device="cuda")
    args = MatmulArgs(a, b, bias, c, scale, depth**-0.5, activation, out)
    engine.gemm(d, args, config)
    exact = apply_epilogue(0.5 * depth**-0.5 * (a.double() @ b.double()), bias, c, activation, torch.float64)
    assert worst_tile(d, exact) < {bf16: 4e-3, fp16: 1e-3, fp32: 2e-4}[out]
    first = d.clone()
    for _ in range(20):
        engine.gemm(d.fill_(torch.nan), args, config)
        assert torch.equal(d, first), "the same bits every time"
