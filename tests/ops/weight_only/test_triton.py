"""The Triton forms beyond the generic tests: quantisation bit by bit, every split and orientation, five targets."""

import itertools

import pytest
import torch

from tilewright.dispatch import contract, implementations
from tilewright.ops.weight_only.dequantize_weight import dequantize_weight
from tilewright.ops.weight_only.quantize_weight import quantize_weight
from tilewright.ops.weight_only.samples import random_weight
from tilewright.ops.weight_only.weight_only_matmul import WeightOnlyMatmulArgs, WeightOnlyMatmulBucket, product

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")


def triton_of(name):
    op = contract(name).forward
    return implementations(op.op, "fwd")["triton"]


def operands(m, n, k, bits, dtype=bf16, device="cpu"):
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    return x, *random_weight(n, k, bits, dtype, torch.device(device), generator)


@pytest.mark.interp
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (16, 128), (33, 640), (40, 262)])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_quantised_bits_are_those_of_the_reference(bits, n, k, dtype):
    w = torch.randn(n, k) * torch.exp2(20 * torch.rand(n, 1) - 10)
    w[0, 0] = torch.nan if n > 16 else 0
    w[-1, -1] = torch.inf if n > 16 else 1
    w[n // 2] *= n > 33
    q, scales = quantize_weight(w.to(dtype), bits=bits, backend="triton")
    wanted, wanted_scales = quantize_weight(w.to(dtype), bits=bits, backend="torch")
    assert torch.equal(q, wanted)
    assert torch.equal(scales.nan_to_num(-1), wanted_scales.nan_to_num(-1))
    made, restored = (dequantize_weight(q, scales, dtype=fp16, backend=b) for b in ("triton", "torch"))
    assert torch.equal(made.nan_to_num(-1), restored.nan_to_num(-1))


SIZES = ((3, 72, 512), (20, 130, 1100))
CASES = [  # m, n, k, bits, config
    (m, n, k, bits, (16, 64, 4, 3, splits, swapped))
    for (m, n, k), bits, splits, swapped in itertools.product(
        [(3, 72, 512), (20, 130, 1100)], (8, 4), (1, 2, 8), (False, True)
    )
]


@pytest.mark.interp
@pytest.mark.parametrize(("m", "n", "k", "bits", "config"), CASES)
def test_every_split_and_orientation(m, n, k, bits, config):
    implementation = triton_of("weight_only_matmul")
    x, q, scales = operands(m, n, k, bits)
    bias = torch.randn(n)
    d = torch.full((m, n), torch.nan)
    implementation.launch((d,), x, q, scales, bias, "silu", fp32, config=implementation.config_type(*config))
    wanted = product(WeightOnlyMatmulArgs(x.double(), q, scales, bias, "silu", fp32))
    assert ((d - wanted).norm(dim=0) / wanted.norm(dim=0)).max() < 1e-5
    again = torch.empty_like(d)
    implementation.launch((again,), x, q, scales, bias, "silu", fp32, config=implementation.config_type(*config))
    assert torch.equal(d, again)


def test_candidates_are_distinct_and_leave_work_for_every_part():
    implementation = triton_of("weight_only_matmul")
    for m, k in itertools.product((1, 16, 64, 512), (128, 1024, 16384)):
        bucket = WeightOnlyMatmulBucket(m, 4096, k, bits=4, aligned=1, out_bits=16, gated=0)
        found = implementation.candidates(bucket, bf16)
        assert len(set(found)) == len(found) > 0
        assert all(2 * config.splits <= k // 128 or config.splits == 1 for config in found)
        assert implementation.configure(bucket, bf16) in implementation.configs


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", [8, 4])
def test_channels_as_rows_of_the_matrix_instruction(arch, bits):
    from tests.harness.fake_driver import target
    from tests.harness.resources import resources

    implementation = triton_of("weight_only_matmul")
    x, q, scales = (t.to("meta") for t in operands(16, 256, 1024, bits))
    d = torch.empty(16, 256, dtype=bf16, device="meta")
    with target(arch) as compiled:
        config = implementation.config_type(16, 64, 4, 3, 1, True)
        implementation.launch((d,), x, q, scales, None, "", bf16, config=config)
    (kernel,) = map(resources, compiled)
    assert kernel.faults() == []
    assert arch != "sm_90" or "wgmma" in kernel.matrix_instructions[0], kernel.matrix_instructions


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k", "bits", "config"), CASES)
def test_results_on_a_gpu(m, n, k, bits, config):
    implementation = triton_of("weight_only_matmul")
    config = implementation.config_type(*config)
    x, q, scales = operands(m, n, k, bits, fp16, "cuda")
    d = torch.full((m, n), torch.nan, dtype=fp32, device="cuda")
    implementation.launch((d,), x, q, scales, None, "", fp32, config=config)
    wanted = product(WeightOnlyMatmulArgs(x.double(), q, scales, None, "", fp32))
    assert ((d - wanted).norm(dim=0) / wanted.norm(dim=0)).max() < 1e-5
    first = d.clone()
    for _ in range(20):
        implementation.launch((d.fill_(torch.nan),), x, q, scales, None, "", fp32, config=config)
        assert torch.equal(d, first), "the same bits every time"
