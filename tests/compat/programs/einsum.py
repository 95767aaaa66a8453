"""Products of batches in einsum notation, bf16 and float8."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, count_bytes
from deep_gemm.utils.math import ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8

device = "cuda" if torch.cuda.is_available() else "cpu"
b, h, r, d = (128, 8, 4096, 1024) if device == "cuda" else (5, 3, 272, 136)
s, m, n, k = (129, 128, 384, 128) if device == "cuda" else (9, 16, 24, 32)


def test_bmk_bnk_mn():
    for dtype in (torch.float, torch.bfloat16):
        x = torch.randn((s, m, k), dtype=torch.bfloat16, device=device)
        y = torch.randn((s, n, k), dtype=torch.bfloat16, device=device)
        z = torch.randn((m, n), dtype=dtype, device=device)
        c = z if dtype == torch.float else None
        ref_z = (c if dtype == torch.float else 0) + torch.bmm(x.float(), y.float().mT).sum(0)
        deep_gemm.einsum("bmk,bnk->mn", x, y, z, c=c)
        assert calc_diff(z, ref_z) < 1e-5


def test_batched():
    for expr, x_width, z_width in (("bhr,hdr->bhd", r, d), ("bhd,hdr->bhr", d, r)):
        x = torch.randn((b, h, x_width), device=device, dtype=torch.bfloat16)
        y = torch.randn((h, d, r + 128), device=device, dtype=torch.bfloat16)[:, :, :r]
        z = torch.empty((b, h, z_width), device=device, dtype=torch.bfloat16)
        deep_gemm.einsum(expr, x, y, z)
        assert calc_diff(z, torch.einsum(expr, x.float(), y.float())) < 1e-5


def construct_fp8():
    x = torch.randn((b, h, r), device=device, dtype=torch.bfloat16)
    y = torch.randn((h, d, r), device=device, dtype=torch.bfloat16)
    x_fp8 = per_token_cast_to_fp8(x.view(-1, r), use_ue8m0=True)
    x_fp8 = x_fp8[0].view(b, h, r), x_fp8[1].view(b, h, ceil_div(r, 128))
    y_fp8 = (
        torch.empty_like(y, dtype=torch.float8_e4m3fn),
        torch.empty((h, ceil_div(d, 128), ceil_div(r, 128)), device=device, dtype=torch.float),
    )
    for i in range(h):
        y_fp8[0][i], y_fp8[1][i] = per_block_cast_to_fp8(y[i], use_ue8m0=True)
    z = torch.empty((b, h, d), device=device, dtype=torch.bfloat16)
    return x_fp8, y_fp8, z, torch.einsum("bhr,hdr->bhd", x.float(), y.float())


def test_fp8():
    x_fp8, y_fp8, z, ref_z = construct_fp8()
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x_fp8, y_fp8, z)
    assert calc_diff(z, ref_z) < 1e-3


def test_time():
    x_fp8, y_fp8, z, _ = construct_fp8()
    t = bench_kineto(
        lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", x_fp8, y_fp8, z), "gemm_", suppress_kineto_output=True
    )
    print(
        f" > Perf ({b=:4.0f}, {h=}, {r=}, {d=}): {t * 1e6:4.0f} us | "
        f"throughput: {2 * b * h * r * d / t / 1e12:4.0f} TFLOPS, {count_bytes((x_fp8, y_fp8, z)) / t / 1e9:4.0f} GB/s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    test_bmk_bnk_mn()
    test_batched()
    test_fp8()
    test_time()
