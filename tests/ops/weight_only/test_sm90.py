"""The Hopper kernel: what it chooses, refuses, launches and compiles; on a Hopper GPU, what it computes."""

from itertools import product

import pytest
import torch

from tilewright.errors import InputError
from tilewright.jit.collect import collect
from tilewright.jit.compilers import CompileError, nvrtc
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import weight_only_matmul as cuda
from tilewright.ops.weight_only.kernels.sm90 import weight_only_model as model
from tilewright.ops.weight_only.kernels.sm90.weight_only_model import Work
from tilewright.ops.weight_only.samples import random_weight
from tilewright.ops.weight_only.weight_only_matmul import WeightOnlyMatmulArgs, WeightOnlyMatmulBucket

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (7168, 16384), (576, 512), (64, 128)]
ROWS = (1, 5, 16, 17, 64, 4096)
needs_nvrtc = pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())


def deepest(bits, tokens, tiles, warps, split, ctas):
    made = model.deepest(bits, tokens, tiles, warps, split, ctas)
    assert made is not None
    return made


def operands(m, n, k, bits, dtype=bf16, scales=None, device="cpu"):
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    return x, *random_weight(n, k, bits, scales or dtype, torch.device(device), generator)


def run(d, x, q, scales, config, bias=None, activation=""):
    cuda.launch((d,), WeightOnlyMatmulArgs(x, q, scales, bias, activation, d.dtype), config)


def bucket(m, n, k, bits):
    return WeightOnlyMatmulBucket(m, n, k, bits, aligned=1, out_bits=16, gated=0)


# ----------------------------------------------------------------------------------------------- what it chooses


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_chosen_fits_and_is_listed(n, k, bits):
    for m in ROWS:
        where = bucket(m, n, k, bits)
        chosen, tried = cuda.configure(where, bf16), cuda.candidates(where, bf16)
        assert chosen in cuda.CONFIGS
        assert 1 <= len(tried) <= 24
        assert len(set(tried)) == len(tried)
        for config in (chosen, *tried):
            assert config.tokens >= min(m, 64)
            assert config.stages >= 2
            assert model.shared_bytes(config, bits) <= model.SHARED[config.ctas]
            assert config.split <= model.k_blocks(k, bits), "every block of a cluster has some of K"


def test_few_tiles_are_split_and_many_are_not():
    assert model.ranked(model.defaults(8), Work(1, 2112, 7168, 8))[0].split >= 4
    assert model.ranked(model.defaults(8), Work(1, 28672, 4096, 8))[0].split == 1


def test_a_prediction_is_not_under_the_time_to_read_the_weight():
    for (n, k), bits in product(LAYERS[:6], (8, 4)):
        for config in cuda.candidates(bucket(1, n, k, bits), bf16):
            assert model.predicted_us(config, Work(1, n, k, bits)) >= 0.8 * n * k * bits / 8 / model.READ


# ----------------------------------------------------------------------------------------------- what it refuses


def why_not(x, q, scales, bias):
    return cuda.why_not(WeightOnlyMatmulArgs(x, q, scales, bias, "", bf16))


def test_what_it_cannot_do_is_said(monkeypatch):
    x, q, scales = operands(3, 64, 256, 8)
    monkeypatch.setattr(cuda, "device_info", lambda _: type("Info", (), {"arch": "sm_80"}))
    assert "written for Hopper" in str(why_not(x, q, scales, None))
    monkeypatch.setattr(cuda, "device_info", lambda _: type("Info", (), {"arch": "sm_90"}))
    assert why_not(x, q, scales, None) is None
    assert "side by side" in str(why_not(x, q, scales.contiguous(), None))
    assert "float64" in str(why_not(x, q, scales, torch.zeros(64).double()))
    x, q, scales = operands(3, 64, 40, 4)
    assert "multiples of 16 bytes" in str(why_not(x, q, scales, None)), "rows of 20 bytes"


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernel and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls, self.processors = [], [], 132
        monkeypatch.setattr(cuda, "tensor_map", lambda t, box, **_: self.maps.append((tuple(t.shape), box)))
        monkeypatch.setattr(cuda, "usable_sms", lambda _: self.processors)
        monkeypatch.setattr(cuda, "KERNEL", lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def test_boxes_are_128_bytes_of_the_weight_and_the_same_k_of_the_rest(launches):
    for bits, groups in ((8, 1), (4, 2)):
        config = deepest(bits, 8, 2, 4, 2, 2)
        run(torch.empty(3, 200, dtype=bf16), *operands(3, 200, 512, bits), config)
        assert launches.maps == [((200, 64 * bits), (128, 128)), ((3, 512), (3, 64)), ((4, 200), (groups, 128))]
        (grid, args, params, options) = launches.calls.pop()
        launches.maps.clear()
        assert grid == (2 * 2,)
        shared = model.shared_bytes(config, bits, 2)
        assert options == {"block": 160, "shared_bytes": shared, "cluster": (2, 1, 1)}
        assert args[-5:] == (3, 200, 512, 3, True)
        assert params.kBits == bits
        assert params.Scale is bf16


@pytest.mark.parametrize(("processors", "clusters"), [(132, 30), (1, 1)])
def test_clusters_are_as_many_as_fit(launches, processors, clusters):
    launches.processors = processors
    config = deepest(8, 8, 2, 4, 4, 1)
    run(torch.empty(1, 32000, dtype=bf16), *operands(1, 32000, 512, 8), config)
    assert launches.calls[0][0] == (4 * clusters,)


def test_more_rows_than_tokens_are_more_tiles(launches):
    run(torch.empty(20, 64), *operands(20, 64, 128, 8), deepest(8, 8, 1, 4, 1, 2))
    assert launches.calls[0][0] == (3,)


def test_blocks_without_steps_are_refused(launches):
    config = deepest(4, 8, 1, 4, 2, 1)
    with pytest.raises(InputError, match="K=256 has 1 steps of 256"):
        run(torch.empty(1, 64), *operands(1, 64, 256, 4), config)
    assert not launches.calls


# ----------------------------------------------------------------------------------------------- what it compiles

INSTANCES = [  # bits, config, activation, Element, Scale, Out, Bias
    (bits, config, ACTIVATIONS[n % 5], (bf16, fp16)[n % 2], (bf16, fp32, fp16)[n % 3], (bf16, fp32)[n // 2 % 2], fp32)
    for bits in (8, 4)
    for n, config in enumerate([c for tokens in model.TOKENS for c in model.space(bits, tokens)][::9])
]


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("bits", "config", "activation", "element", "scale", "out", "bias"), INSTANCES)
def test_instances_spill_nothing(bits, config, activation, element, scale, out, bias):
    n = 512
    x, q, scales = (t.to("meta") for t in operands(min(8, config.tokens), n, 4096, bits, element, scale))
    d = torch.empty(x.shape[0], columns_out(n, activation), dtype=out, device="meta")
    with collect("sm_90") as collector:
        run(d, x, q, scales, config, torch.zeros(n, dtype=bias, device="meta"), activation)
    (job,) = collector.jobs
    info = job.compile().info
    assert info["stack_bytes"] == info["spill_stores"] == 0
    assert not info["instructions"].keys() & {"LDL", "STL"}
    # 128 or 256 of K are 8 or 16 times 16; with many tokens two groups of 128 are one loop
    steps = 8 if bits == 8 or config.tokens >= 32 else 16
    assert info["instructions"]["HMMA"] == steps * config.tiles * config.tokens // 8
    assert info["shared_bytes"] == 0, "barriers lie in dynamic shared memory, so that the ring begins at its start"
    assert info["warnings"] == []


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("bits", "scale"), [(8, bf16), (4, bf16), (4, fp32)])
@pytest.mark.parametrize("shape", [(8, 1, 4, 1, 2), (64, 2, 4, 4, 1), (16, 2, 8, 7, 1)])
def test_host_and_kernel_agree_on_shared_memory(bits, scale, shape, monkeypatch):
    config = deepest(bits, *shape)
    params = cuda.Params(bits, *config, 0, bf16, scale, bf16, bf16)
    text, barriers = cuda.KERNEL.source(params), 16 * (1 + config.stages)

    def compile_claiming(size):
        claim = f"static_assert(tilewright::Layout<Config>::kBarriersOffset + {barriers} == {size});\n"
        monkeypatch.setattr(cuda.KERNEL, "source", lambda _: text + claim)
        cuda.KERNEL.compile(params, "sm_90")

    size = model.shared_bytes(config, bits, scale.itemsize)
    compile_claiming(size)
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_claiming(size + 8)


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED = {  # rows, columns, depth, bits, (tokens, tiles, warps, split, ctas), activation, element, scale, out
    "one token": (1, 2112, 7168, 8, (8, 2, 4, 4, 2), "", bf16, bf16, bf16),
    "one token, 4 bits": (1, 2112, 7168, 4, (8, 2, 4, 4, 2), "", bf16, bf16, bf16),
    "fp16": (7, 512, 1024, 8, (8, 1, 4, 1, 2), "", fp16, fp16, fp32),
    "fp16, 4 bits": (7, 512, 1024, 4, (8, 1, 8, 2, 1), "", fp16, fp32, fp32),
    "ragged": (13, 200, 400, 8, (16, 2, 4, 3, 1), "gelu", bf16, fp32, fp32),
    "ragged, 4 bits": (13, 200, 416, 4, (16, 2, 4, 2, 1), "gelu", bf16, bf16, fp32),
    "neighbours": (29, 1000, 640, 8, (32, 2, 4, 2, 1), "silu", bf16, bf16, bf16),
    "neighbours, 4 bits": (29, 1000, 640, 4, (32, 1, 8, 2, 1), "silu", fp16, fp16, fp16),
    "gated, eight blocks": (64, 1024, 4096, 8, (64, 2, 4, 8, 1), "swiglu", bf16, bf16, bf16),
    "gated, eight blocks, 4 bits": (64, 1024, 4096, 4, (64, 2, 4, 8, 1), "swiglu", bf16, bf16, bf16),
    "many tiles a cluster": (5, 60000, 512, 4, (8, 1, 4, 2, 2), "relu", bf16, bf16, bf16),
    "more rows than tokens": (61, 320, 512, 8, (16, 2, 8, 2, 1), "", bf16, bf16, fp32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    m, n, k, bits, shape, activation, element, scale, out = COMPUTED[case]
    config = deepest(bits, *shape)
    x, q, scales = operands(m, n, k, bits, element, scale, "cuda")
    bias = torch.randn(n, device="cuda")
    d = torch.full((m, columns_out(n, activation)), torch.nan, dtype=out, device="cuda")
    run(d, x, q, scales, config, bias, activation)
    z = x.double() @ packing.restore(q, scales.double()).T
    wanted = apply_epilogue(z, bias, None, activation, torch.float64)
    for f, e in zip(d.double().split(64, -1), wanted.split(64, -1), strict=True):
        assert (f - e).norm() < {bf16: 4e-3, fp16: 1e-3, fp32: 5e-5}[out] * e.norm()
    first = d.clone()
    for _ in range(200):
        run(d.fill_(torch.nan), x, q, scales, config, bias, activation)
        assert torch.equal(d, first), "the same bits every time"
