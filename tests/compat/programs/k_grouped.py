"""Weight gradients of experts, bf16 and float8."""

import random

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, count_bytes
from deep_gemm.utils import align, get_mk_alignment_for_contiguous_layout, per_channel_cast_to_fp8

device = "cuda" if torch.cuda.is_available() else "cpu"
num_groups, m, n, expected_k = (4, 4096, 2048, 2048) if device == "cuda" else (3, 24, 40, 200)


def construct():
    ks = [align(int(expected_k * random.uniform(0.7, 1.3)), get_mk_alignment_for_contiguous_layout())
          for _ in range(num_groups)]  # fmt: skip
    ks[1] = 0
    a = torch.randn((sum(ks), m), device=device, dtype=torch.bfloat16)
    b = torch.randn((sum(ks), n), device=device, dtype=torch.bfloat16)
    d = torch.randn((num_groups, m, n), device=device, dtype=torch.float) * 32
    ref_d = d.clone()
    start = 0
    for i, k in enumerate(ks):
        ref_d[i] += a[start : start + k].float().T @ b[start : start + k].float()
        start += k
    return a, b, d, ref_d, ks, torch.tensor(ks, device=device, dtype=torch.int)


def k_major(x, ks):
    data, sf = per_channel_cast_to_fp8(x, use_ue8m0=False)
    mn = x.size(1)
    flat = torch.empty((x.numel(),), device=device, dtype=data.dtype)
    start = 0
    for k in ks:
        flat[start * mn : (start + k) * mn] = data[start : start + k].T.flatten()
        start += k
    return flat, sf.T


def test_k_grouped():
    a, b, d, ref_d, ks, ks_tensor = construct()
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, ks_tensor, d)
    assert calc_diff(d, ref_d) < 1e-5

    a, b, d, ref_d, ks, ks_tensor = construct()
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(k_major(a, ks), k_major(b, ks), d, ks, ks_tensor, d)
    assert calc_diff(d, ref_d) < 0.001


def test_time():
    a, b, d, _, ks, ks_tensor = construct()
    a_fp8, b_fp8 = k_major(a, ks), k_major(b, ks)

    def test_func():
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a_fp8, b_fp8, d, ks, ks_tensor, d, recipe=(1, 1, 128))

    t = bench_kineto(test_func, "gemm_", suppress_kineto_output=True)
    print(
        f" > Perf ({num_groups=}, {m=}, {n=}, k={sum(ks)}): {t * 1e6:4.0f} us | "
        f"throughput: {2 * m * n * sum(ks) / t / 1e12:4.0f} TFLOPS, {count_bytes(a_fp8, b_fp8, d) / 1e9 / t:4.0f} GB/s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    test_k_grouped()
    test_time()
