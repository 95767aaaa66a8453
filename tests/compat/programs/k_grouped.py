"""Gradients of experts' weights as programs call DeepGEMM: sums over the rows of each group, bf16 and float8."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff
from deep_gemm.utils import per_channel_cast_to_fp8

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIZES, LEFT, RIGHT = ([2048, 0, 1280, 128], 4096, 2048) if GPU else ([256, 0, 128, 384], 24, 40)


def problem():
    """x (T, LEFT), y (T, RIGHT), sums that are already there, and what they are to be."""
    x, y = (torch.randn(sum(SIZES), width, device=DEVICE).bfloat16() for width in (LEFT, RIGHT))
    before = torch.randn(len(SIZES), LEFT, RIGHT, device=DEVICE) * 32
    parts = zip(x.float().split(SIZES), y.float().split(SIZES), strict=True)
    return x, y, before, before + torch.stack([left.T @ right for left, right in parts])


def along_k(x):
    """The groups as DeepGEMM has them on Hopper: matrices (width, size), one behind the other."""
    q, scales = per_channel_cast_to_fp8(x, use_ue8m0=False)
    pieces = [piece.T.flatten() for piece in q.view(torch.uint8).split(SIZES)]
    return torch.cat(pieces).view(q.dtype), scales.T


def check(kind, limit):
    x, y, sums, exact = problem()
    on_device = torch.tensor(SIZES, device=DEVICE, dtype=torch.int32)
    if kind == "bf16":
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x, y, sums, SIZES, on_device, sums)
    else:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(along_k(x), along_k(y), sums, SIZES, on_device, sums)
    assert calc_diff(sums, exact) < limit, kind


def check_legacy():
    x, y, sums, exact = problem()
    ends = torch.tensor(SIZES, device=DEVICE).cumsum(0).int()
    starts = ends - torch.tensor(SIZES, device=DEVICE, dtype=torch.int32)
    places = torch.arange(sum(SIZES), device=DEVICE, dtype=torch.int32)
    deep_gemm.legacy.b_fused_k_grouped_bf16_gemm_tn_contiguous_tl(x, y, sums, (places, starts, ends), True)
    assert calc_diff(sums, exact) < 1e-5


def time_one():
    x, y, sums, _ = problem()
    a, b, on_device = along_k(x), along_k(y), torch.tensor(SIZES, device=DEVICE, dtype=torch.int32)

    def call():
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, sums, SIZES, on_device, sums, recipe=(1, 1, 128))

    seconds = bench_kineto(call, "gemm_", suppress_kineto_output=True)
    print(f"{len(SIZES)} groups: {seconds * 1e6:.1f} us, {2e-12 * sum(SIZES) * LEFT * RIGHT / seconds:.2f} TFLOPS")


if __name__ == "__main__":
    torch.manual_seed(0)
    check("bf16", 1e-5)
    check("fp8", 1e-3)
    check_legacy()
    time_one()
