"""Products of groups of rows, contiguous and masked, bf16 and float8."""

import random

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, count_bytes
from deep_gemm.utils import align, ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8

device = "cuda" if torch.cuda.is_available() else "cpu"
num_groups, expected_m, max_m, n, k = (4, 1024, 4096, 4096, 2048) if device == "cuda" else (3, 9, 16, 144, 256)


def cast_grouped(x, cast):
    data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    rows = x.size(1) if cast is per_token_cast_to_fp8 else ceil_div(x.size(1), 128)
    sf = torch.empty((x.size(0), rows, ceil_div(x.size(2), 128)), device=device, dtype=torch.float)
    for i in range(x.size(0)):
        data[i], sf[i] = cast(x[i], use_ue8m0=False)
    return data, sf


def construct_contiguous(use_psum_layout):
    actual_ms = [int(expected_m * random.uniform(0.7, 1.3)) for _ in range(num_groups)]
    aligned_ms = [align(m, deep_gemm.get_mk_alignment_for_contiguous_layout()) for m in actual_ms]
    m = sum(aligned_ms)
    x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
    y = torch.randn((num_groups, n, k), device=device, dtype=torch.bfloat16)
    layout = torch.empty(num_groups if use_psum_layout else m, device=device, dtype=torch.int32)
    out = torch.empty((m, n), device=device, dtype=torch.bfloat16)
    ref_out = torch.randn((m, n), device=device, dtype=torch.bfloat16)
    valid = torch.zeros(m, device=device, dtype=torch.bool)
    start = 0
    for i, (actual_m, aligned_m) in enumerate(zip(actual_ms, aligned_ms, strict=True)):
        if use_psum_layout:
            layout[i] = start + actual_m
        else:
            layout[start : start + actual_m] = i
            layout[start + actual_m : start + aligned_m] = -1
        valid[start : start + actual_m] = True
        ref_out[start : start + aligned_m] = x[start : start + aligned_m] @ y[i].t()
        start += aligned_m
    return x, y, layout, out, ref_out, valid


def test_contiguous():
    for use_psum_layout in (False, True):
        x, y, layout, out, ref_out, valid = construct_contiguous(use_psum_layout)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, y, out, layout, use_psum_layout=use_psum_layout)
        assert calc_diff(out[valid], ref_out[valid]) < 1e-5
        x_fp8 = per_token_cast_to_fp8(x, use_ue8m0=False)
        y_fp8 = cast_grouped(y, per_block_cast_to_fp8)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            x_fp8, y_fp8, out, layout, disable_ue8m0_cast=True, use_psum_layout=use_psum_layout
        )
        assert calc_diff(out[valid], ref_out[valid]) < 0.001


def test_masked():
    x = torch.randn((num_groups, max_m, k), device=device, dtype=torch.bfloat16)
    y = torch.randn((num_groups, n, k), device=device, dtype=torch.bfloat16)
    out = torch.empty((num_groups, max_m, n), device=device, dtype=torch.bfloat16)
    ref_out = torch.einsum("gmk,gnk->gmn", x, y)
    masked_m = torch.empty((num_groups,), device=device, dtype=torch.int)
    for j in range(num_groups):
        masked_m[j] = int(expected_m * random.uniform(0.7, 1.3))

    x_fp8, y_fp8 = cast_grouped(x, per_token_cast_to_fp8), cast_grouped(y, per_block_cast_to_fp8)
    for func, a, b, max_diff in (
        (deep_gemm.m_grouped_bf16_gemm_nt_masked, x, y, 1e-5),
        (deep_gemm.m_grouped_fp8_gemm_nt_masked, x_fp8, y_fp8, 0.001),
    ):
        func(a, b, out, masked_m, expected_m)
        for j in range(num_groups):
            diff = calc_diff(out[j, : masked_m[j].item()], ref_out[j, : masked_m[j].item()])
            assert diff < max_diff, f"{func.__name__}, {j=}, masked_m={masked_m[j]}, {diff:.5f}"


def test_time():
    x, y, layout, out, _, _ = construct_contiguous(False)
    a, b = per_token_cast_to_fp8(x, use_ue8m0=False), cast_grouped(y, per_block_cast_to_fp8)

    def test_func():
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, layout)

    t = bench_kineto(test_func, "fp8_gemm", suppress_kineto_output=True)
    print(
        f" > Perf ({num_groups=}, m={x.size(0)}, {n=}, {k=}): {t * 1e6:4.0f} us | "
        f"throughput: {2 * x.size(0) * n * k / t / 1e12:4.0f} TFLOPS, {count_bytes(a, b, out) / 1e9 / t:4.0f} GB/s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    test_contiguous()
    test_masked()
    test_time()
