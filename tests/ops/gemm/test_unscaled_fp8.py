"""Products of e4m3 without scales: when `auto` takes cuBLASLt, and on a GPU what that computes."""

import pytest
import torch

from tilewright.ops import matmul
from tilewright.ops.gemm.dense import float8
from tilewright.ops.gemm.dense.args import matmul_bucket, plain_args
from tilewright.ops.gemm.matmul import FORWARD

fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16


def operands(m, n, k, device="cpu"):
    return torch.randn(m, k, device=device).to(fp8), torch.randn(n, k, device=device).to(fp8).mT


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("m", "n", "k", "turned", "torchs"),
    [(509, 1536, 1536, False, True), (64, 1536, 1536, False, False), (509, 1536, 8208, False, False),
     (509, 1536, 1530, False, False), (512, 1536, 1536, True, False)],
)  # fmt: skip
def test_what_cublas_takes_without_copies(m, n, k, turned, torchs):
    a, b = operands(m, n, k)
    bucket = matmul_bucket(plain_args(a, b.contiguous() if turned else b, bf16))
    assert FORWARD.torch_first(bucket, fp8, "triton") is torchs


def test_a_cpu_multiplies_bf16():
    a, b = operands(5, 6, 32)
    assert float8.product(a, b, None, bf16) is None
    assert torch.equal(matmul(a, b), matmul(a.to(bf16), b.to(bf16)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 509])
@pytest.mark.parametrize("k", [48, 1536, 8208])
def test_the_reference_on_a_gpu(m, k):
    a, b = operands(m, 144, k, "cuda")
    exact = a.double() @ b.double()
    assert relative_error(matmul(a, b, backend="torch"), exact) < 4e-3
    scale = torch.tensor(0.25, device="cuda")
    c = torch.randn(m, 144, device="cuda", dtype=bf16)
    found = matmul(a, b, alpha=scale, c=c, activation="relu", out_dtype=torch.float32, backend="torch")
    assert relative_error(found, (exact / 4).relu() + c.double()) < 2e-3
    out = torch.full((m, 144), 7.0, device="cuda", dtype=bf16)
    assert matmul(a, b.contiguous(), alpha=0.5, out=out, backend="torch") is out
    assert relative_error(out, exact / 2) < 4e-3


@pytest.mark.gpu
def test_captures_and_other_streams():
    a, b = operands(128, 256, 512, "cuda")
    exact = a.double() @ b.double()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(a, b, backend="torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert relative_error(matmul(a, b, backend="torch"), exact) < 4e-3
    torch.cuda.synchronize()
    captured.fill_(torch.nan)
    graph.replay()
    assert relative_error(captured, exact) < 4e-3
