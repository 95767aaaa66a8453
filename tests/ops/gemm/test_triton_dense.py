"""What the dense Triton kernel chooses, what of it fits where, and what the compilers make of it."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.ops.gemm.dense.args import MatmulArgs, MatmulBucket, plain_args
from tilewright.ops.gemm.kernels.triton import dense as engine
from tilewright.ops.gemm.kernels.triton import tiles as triton_tiles
from tilewright.ops.gemm.kernels.triton.tiles import SHARED_BYTES, Config

ROOT = Path(__file__).parents[3]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def buckets(count=300):
    rng = random.Random(0)
    for _ in range(count):
        m, n, k = 1 << rng.randrange(15), rng.randrange(2, 40000), rng.randrange(1, 20000)
        yield MatmulBucket(m, n, k, rng.randrange(4), rng.randrange(2), rng.choice((16, 32)), rng.randrange(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_configure_returns_is_listed(dtype):
    listed = engine.CONFIGS if dtype.itemsize > 1 else engine.configured(dtype)
    for bucket in buckets():
        assert engine.configure(bucket, dtype) in listed


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_search_space_is_small_and_legal(dtype):
    for bucket in buckets(60):
        space = engine.candidates(bucket, dtype)
        assert 0 < len(space) <= 64
        assert len(set(space)) == len(space)
        for config in space:
            assert config.block_m & (config.block_m - 1) == config.block_n & (config.block_n - 1) == 0
            assert min(config.block_m, config.block_n) >= 16 or (config.block_m == bucket.M == 1)
            assert bucket.aligned or not config.descriptors
            assert config.splits == 1 or 2 * config.splits * config.block_k <= bucket.K


def test_a_batch_invariant_call_never_splits_k():
    for n, k in ((64, 16384), (576, 7168), (4096, 7168)):
        assert engine.configure(MatmulBucket(4096, n, k, 0, 1, 16, 0), torch.bfloat16).splits == 1


def test_few_rows_split_k_until_the_gpu_is_full():
    assert engine.configure(MatmulBucket(16, 2112, 7168, 0, 1, 16, 0), torch.bfloat16).splits == 4
    assert engine.configure(MatmulBucket(16, 4096, 7168, 0, 1, 16, 0), torch.bfloat16).splits == 2
    assert engine.configure(MatmulBucket(16, 32768, 512, 0, 1, 16, 0), torch.bfloat16).splits == 1


def test_a_small_gpu_gets_fewer_stages_or_a_narrower_tile():
    large = Config(128, 256, 64, 8, 4, 8, True, 1)
    c = torch.empty(1, 64, 64)
    assert triton_tiles.fitted(large, "sm_90", 2, 2, None, "").config == large
    assert triton_tiles.fitted(large, "sm_90", 2, 4, c, "").config.num_stages == 3
    assert triton_tiles.fitted(large, "gfx942", 2, 2, None, "").config.num_stages == 2
    assert triton_tiles.fitted(large, "gfx942", 2, 2, c, "").config.block_n == 128
    assert triton_tiles.fitted(large, "gfx942", 2, 2, c[..., 1:], "").config.block_n == 64, (
        "the accumulator moves, whole"
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_float8_is_refused_where_triton_has_none(arch, monkeypatch):
    a = torch.empty(16, 16, dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(engine, "target_of", lambda _: arch)
    reason = engine.why_not(plain_args(a, a, torch.bfloat16))
    assert (reason is None) == (arch == "sm_89")


# Compiled for GPUs that are not here.

FULL = {"bias": True, "c": True, "scale": True}
PROBLEMS = {
    "plain": {},
    "nn": {"layout": "nn"},
    "tn_accumulates_in_float32": {"layout": "tn", "c": True, "out_dtype": torch.float32},
    "bias_gelu": {"bias": True, "activation": "gelu"},
    "swiglu": {"activation": "swiglu"},
    "everything": {**FULL, "activation": "silu"},
    "odd": {"n": 2111, "k": 4095},
    "few_rows_in_splits": {"m": 16, "n": 2112, "k": 7168, **FULL},
    "float8": {"dtype": torch.float8_e4m3fn, "scale": True},
    "float32": {"dtype": torch.float32, "bias": True},
}
# Elsewhere than on sm_90, one of each shape of the kernel; `make test-exhaustive` compiles every configuration
ELSEWHERE = ("plain", "everything", "odd", "few_rows_in_splits", "float8", "float32")
COMPILED = [(name, arch) for name in PROBLEMS for arch in ARCHITECTURES if arch == "sm_90" or name in ELSEWHERE]


def launch(m=4096, n=4096, k=4096, layout="nt", dtype=torch.bfloat16, out_dtype=None, activation="", **terms):
    def meta(*shape, of):
        return torch.empty(*shape, dtype=of, device="meta")

    out_dtype = out_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
    a = meta(1, k, m, of=dtype).mT if layout[0] == "t" else meta(1, m, k, of=dtype)
    b = meta(1, k, n, of=dtype) if layout[1] == "n" else meta(1, n, k, of=dtype).mT
    shape = (1, m, n // 2 if activation == "swiglu" else n)
    bias = meta(n, of=out_dtype) if terms.get("bias") else None
    c = meta(*shape, of=out_dtype) if terms.get("c") else None
    scale = meta(1, of=torch.float32) if terms.get("scale") else None
    bits = 8 * out_dtype.itemsize
    code = ("nt", "nn", "tn", "tt").index(layout)
    bucket = MatmulBucket(m, n, k, code, int(n % 16 == 0), bits, int(activation == "swiglu"))
    config = engine.configure(bucket, dtype)
    args = MatmulArgs(a, b, bias, c, scale, 1.5, activation, out_dtype)
    engine.gemm(meta(*shape, of=out_dtype), args, config)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_compiles_without_spills_onto_the_matrix_units(name, arch):
    float8 = PROBLEMS[name].get("dtype", torch.bfloat16).itemsize == 1
    if float8 and arch == "sm_80":
        pytest.skip("Triton has no float8_e4m3fn before sm_89")
    if not (float8 and arch.startswith("gfx")):
        examine(name, arch)
    else:
        # Triton keeps the float8 conversions of the first AMD GPU that a process compiles for, and uses them for others
        words = f"from {__name__} import examine; examine({name!r}, {arch!r})"
        done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def examine(name, arch):
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    problem = PROBLEMS[name]
    dtype = problem.get("dtype", torch.bfloat16)
    with target(arch) as compiled:
        launch(**problem)
    found = [resources(kernel) for kernel in compiled]
    assert [r.name for r in found] == ["gemm_kernel", "reduce_kernel"][: 1 + (name == "few_rows_in_splits")]
    assert [r.spilled for r in found] == [0] * len(found)
    assert all(r.shared_bytes <= SHARED_BYTES[arch] for r in found)
    exact = dtype == torch.float32 and arch.startswith("sm_")  # products of scalars: no matrix unit keeps float32
    assert bool(found[0].matrix_instructions) != exact
    if arch == "sm_90" and dtype != torch.float32 and "rows" not in name:
        assert any("wgmma" in i for i in found[0].matrix_instructions)
        bulk = "cp.async.bulk.tensor" in compiled[0].asm["ptx"]
        assert bulk == (name != "odd"), "descriptors are for aligned operands"


@pytest.mark.compile
def test_float8_leaves_the_short_accumulator():
    """Every 128 along K the tensor cores' own sum is added to a float32 one: their instruction starts from zero."""
    from tests.harness.fake_driver import target

    with target("sm_90") as compiled:
        launch(dtype=torch.float8_e4m3fn)
    assert compiled[0].asm["ptx"].count("add.f32") >= 64
