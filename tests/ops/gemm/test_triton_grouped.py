"""What the Triton kernels of grouped products choose, and what the compilers make of it."""

import pytest
import torch

from tilewright.dispatch.bucket import row_bucket
from tilewright.ops.gemm.group_gemm import GroupGemmBucket
from tilewright.ops.gemm.grouped.args import UNSCALED, GroupedArgs, GroupedBucket, KGroupedArgs, KGroupedBucket
from tilewright.ops.gemm.kernels.triton import group_gemm, grouped_rows, k_grouped
from tilewright.ops.gemm.kernels.triton.tiles import SHARED_BYTES
from tilewright.ops.gemm.operands import LAYOUTS
from tilewright.ops.gemm.scaled.scaling import Scaling

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
G = 8

ROWS = {
    "plain": {},
    "starts": {"starts": True},
    "nn": {"layout": "nn"},
    "tn": {"layout": "tn"},
    "masked": {"masked": True},
    "swiglu": {"activation": "swiglu"},
    "wide_result": {"out_dtype": torch.float32, "activation": "silu"},
    "odd": {"n": 2111, "k": 4095},
    "decode": {"m": 16, "masked": True},
    "decode_32": {"m": 20, "masked": True},
    "decode_odd": {"m": 64, "n": 2111, "k": 4095},
    "float32": {"dtype": torch.float32},
    "float8": {"dtype": FP8, "scaling": Scaling.TOKEN_BLOCK},
    "float8_decode_odd": {"dtype": FP8, "scaling": Scaling.TOKEN_BLOCK, "m": 64, "n": 2111, "k": 4095},
    "float8_swiglu": {"dtype": FP8, "scaling": Scaling.TOKEN_BLOCK, "activation": "swiglu"},
    "float8_tokens": {"dtype": FP8, "scaling": Scaling.TOKEN_TOKEN},
    "float8_rows": {"dtype": FP8, "scaling": Scaling.ROW},
    "float8_tensors": {"dtype": FP8, "scaling": Scaling.TENSOR},
    "float8_decode": {"dtype": FP8, "scaling": Scaling.TOKEN_BLOCK, "m": 16, "masked": True},
    "float8_odd": {"dtype": FP8, "scaling": Scaling.TOKEN_BLOCK, "n": 2111, "k": 4095},
}
# Elsewhere than on sm_90, one of each shape of a kernel; tests/compile compiles every configuration for all targets
ROWS_ELSEWHERE = ("plain", "tn", "swiglu", "odd", "decode_odd", "float32", "float8", "float8_decode_odd")
ALONG_K = {
    "tn": {},
    "nt": {"layout": "nt"},
    "nn": {"layout": "nn"},
    "accumulate": {"c": True},
    "narrow_result": {"out_dtype": HALF},
    "small": {"m": 512, "n": 512},
    "odd": {"m": 2111, "n": 4095},
    "float32": {"dtype": torch.float32},
    "float8": {"dtype": FP8, "layout": "nt", "scaling": Scaling.TOKEN_TOKEN, "c": True},
}
ALONG_K_ELSEWHERE = ("tn", "accumulate", "odd", "float32", "float8")


def pairs(problems, elsewhere):
    return [(name, arch) for name in problems for arch in ARCHITECTURES if arch == "sm_90" or name in elsewhere]


def meta(*shape, of):
    return torch.empty(*shape, dtype=of, device="meta")


def scales(scaling, side, rows, depth, *batch):
    return None if scaling is None else scaling.layouts[side].empty(rows, depth, "meta", *batch)


def launch_rows(
    m=4096, n=4096, k=4096, layout="nt", dtype=HALF, out_dtype=HALF, activation="", scaling=None, masked=False,
    starts=False,
):  # fmt: skip
    out_dtype = torch.float32 if dtype == torch.float32 else out_dtype
    batch, rows = (G, m) if masked else (1, G * m)
    a = meta(batch, k, rows, of=dtype).mT if layout[0] == "t" else meta(batch, rows, k, of=dtype)
    b = meta(G, k, n, of=dtype) if layout in ("nn", "tn") else meta(G, n, k, of=dtype).mT
    d = meta(batch, rows, n // 2 if activation == "swiglu" else n, of=out_dtype)
    ends = meta(G, of=torch.int32)
    scale_a, scale_b = scales(scaling, 0, rows, k, batch), scales(scaling, 1, n, k, G)
    code = UNSCALED if scaling is None else int(scaling)
    aligned = int(n % 16 == k % 16 == 0)
    bucket = GroupedBucket(
        row_bucket(m),
        n,
        k,
        G,
        LAYOUTS.index(layout),
        aligned,
        8 * out_dtype.itemsize,
        int(activation == "swiglu"),
        code,
    )
    config = grouped_rows.configure(bucket, dtype)
    starts = ends if starts else None
    grouped_rows.gemm(d, GroupedArgs(a, b, scale_a, scale_b, starts, ends, m, activation, out_dtype), config)


def launch_along_k(m=4096, n=4096, t=8192, layout="tn", dtype=HALF, out_dtype=torch.float32, scaling=None, c=False):
    a = meta(t, m, of=dtype).mT if layout[0] == "t" else meta(m, t, of=dtype)
    b = meta(t, n, of=dtype) if layout[1] == "n" else meta(n, t, of=dtype).mT
    d = meta(G, m, n, of=out_dtype)
    scale_a, scale_b = scales(scaling, 0, m, t), scales(scaling, 1, n, t)
    code = UNSCALED if scaling is None else int(scaling)
    aligned = int(m % 16 == n % 16 == 0)
    bucket = KGroupedBucket(t, m, n, G, LAYOUTS.index(layout), aligned, 8 * out_dtype.itemsize, code)
    config = k_grouped.configure(bucket, dtype)
    added = meta(G, m, n, of=torch.float32) if c else None
    k_grouped.gemm(d, KGroupedArgs(a, b, scale_a, scale_b, added, meta(G, of=torch.int32), out_dtype), config)


def compiled_well(launch, problem, arch):
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    dtype = problem.get("dtype", HALF)
    if dtype == FP8 and arch in ("sm_80", "gfx942"):
        pytest.skip("has no matrix instruction for float8_e4m3fn, and the kernels say so")
    with target(arch) as compiled:
        launch(**problem)
    (kernel,) = compiled
    found = resources(kernel)
    assert found.spilled == 0, found
    assert found.shared_bytes <= SHARED_BYTES[arch]
    exact = dtype == torch.float32 and arch.startswith("sm_")  # products of scalars: no matrix unit keeps float32
    assert bool(found.matrix_instructions) != exact
    return kernel, found


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), pairs(ROWS, ROWS_ELSEWHERE))
def test_rows_compile_without_spills_onto_the_matrix_units(name, arch):
    problem = ROWS[name]
    kernel, found = compiled_well(launch_rows, problem, arch)
    if arch == "sm_90" and problem.get("m", 4096) > 64 and name != "float32":
        assert any("wgmma" in i for i in found.matrix_instructions)
        by_rows = name == "tn"  # where a group begins anywhere in a line
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == ("odd" not in name and not by_rows)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), pairs(ALONG_K, ALONG_K_ELSEWHERE))
def test_groups_along_k_compile_without_spills_onto_the_matrix_units(name, arch):
    kernel, found = compiled_well(launch_along_k, ALONG_K[name], arch)
    if arch == "sm_90" and name != "float32":
        assert any("wgmma" in i for i in found.matrix_instructions)
        along_t = name in ("nt", "nn")  # where a group begins anywhere in a line
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == (name != "odd" and not along_t)


@pytest.mark.parametrize("kernel", [grouped_rows, k_grouped], ids=["rows", "along_k"])
@pytest.mark.parametrize("dtype", [HALF, FP8, torch.float32], ids=str)
def test_candidates_are_distinct_and_fit_the_tensor_cores_scales(kernel, dtype):
    scaling = int(Scaling.TOKEN_TOKEN) if dtype == FP8 else UNSCALED
    for rows in (16, 64, 4096):
        bucket = (
            KGroupedBucket(rows, 4096, 4096, 8, 0, 1, 32, scaling)
            if kernel is k_grouped
            else GroupedBucket(rows, 4096, 4096, 8, 0, 1, 16, 0, scaling)
        )
        found = kernel.candidates(bucket, dtype)
        assert 2 <= len(found) == len(set(found)) <= 96
        for config in (*found, kernel.configure(bucket, dtype)):
            assert dtype != FP8 or config.block_k == 128, "a scale serves 128 along K"
            assert dtype != FP8 or 128 % config.block_n == 0, "and 128 columns"


PROBLEMS = {
    "nt": {"layout": "nt"},
    "nn": {},
    "tn": {"layout": "tn"},
    "mixed": {"layout": "mixed"},
    "odd": {"odd": 1},
    "small": {"size": 96},
    "float32": {"dtype": torch.float32},
}
PROBLEMS_ELSEWHERE = ("mixed", "odd", "float32")


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), pairs(PROBLEMS, PROBLEMS_ELSEWHERE))
def test_products_of_many_shapes_compile_without_spills_onto_the_matrix_units(name, arch):
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    problem = PROBLEMS[name]
    dtype, layout, odd = problem.get("dtype", HALF), problem.get("layout", "nn"), problem.get("odd", 0)
    a, b = [], []
    for i in range(4):
        here = LAYOUTS[i] if layout == "mixed" else layout
        m, n, k = (problem.get("size", 2048) + 64 * j + odd for j in range(3))
        a.append(meta(k, m, of=dtype).mT if here[0] == "t" else meta(m, k, of=dtype))
        b.append(meta(k, n, of=dtype) if here in ("nn", "tn") else meta(n, k, of=dtype).mT)
    size = max(t.shape[0] for t in a)
    config = group_gemm.configure(GroupGemmBucket(row_bucket(size), size, size, 4, 0, 16, 1), dtype)
    with target(arch) as compiled:
        group_gemm.gemm(meta(4 * 4096 * 4096, of=dtype), a, b, config)
    found = {kernel.name: resources(kernel) for kernel in compiled}
    assert set(found) == {"problem_kernel", "group_gemm_kernel"}
    product = found["group_gemm_kernel"]
    assert product.spilled == 0, product
    exact = dtype == torch.float32 and arch.startswith("sm_")
    assert bool(product.matrix_instructions) != exact
    assert len(compiled) == 2, "one kernel writes every row of the table, whatever its numbers"
