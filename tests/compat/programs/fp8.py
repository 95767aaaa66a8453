"""Dense float8 products: forward, and weight gradients that accumulate."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, count_bytes
from deep_gemm.utils import align, per_block_cast_to_fp8, per_token_cast_to_fp8

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = (
    [(m, n, k) for m in (1, 128, 4096) for n, k in ((2112, 7168), (7168, 2048))]
    if device == "cuda"
    else [(1, 64, 128), (33, 144, 272)]
)


def construct(m, n, k, wgrad, out_dtype):
    a = torch.randn((m, k), device=device, dtype=torch.bfloat16)
    b = torch.randn((n, k), device=device, dtype=torch.bfloat16)
    d = torch.randn((m, n), device=device, dtype=out_dtype) * 32 if wgrad else torch.empty(
        (m, n), device=device, dtype=out_dtype
    )  # fmt: skip
    c = d if wgrad else None
    ref_d = (a.float() @ b.float().t() + (c if wgrad else 0)).to(out_dtype)
    cast_b = per_token_cast_to_fp8 if wgrad else per_block_cast_to_fp8
    return per_token_cast_to_fp8(a, use_ue8m0=False), cast_b(b, use_ue8m0=False), c, d, ref_d


def test_gemm():
    for m, n, k in sizes:
        for wgrad, out_dtype in ((False, torch.bfloat16), (True, torch.float)):
            recipe = (1, 1, 128) if wgrad else None
            a, b, c, d, ref_d = construct(m, n, k, wgrad, out_dtype)
            deep_gemm.fp8_gemm_nt(a, b, d, c=c, disable_ue8m0_cast=True, recipe=recipe)
            diff = calc_diff(d, ref_d)
            assert diff < 0.001, f"{m=}, {n=}, {k=}, {wgrad=}, {diff:.5f}"


def test_layouts():
    m, n, k = sizes[-1]
    for layout in ("nt", "nn", "tn", "tt"):
        a, b, c, d, ref_d = construct(m, n, k, False, torch.bfloat16)
        a = a if layout[0] == "n" else (a[0].T.contiguous(), a[1].T)
        b = b if layout[1] == "t" else (b[0].T.contiguous(), b[1].T)
        getattr(deep_gemm, f"fp8_gemm_{layout}")(a, b, d, c=c)
        assert calc_diff(d, ref_d) < 0.001, layout


def test_scales_as_kernels_read_them():
    m, n, k = sizes[-1]
    a, b, _, d, ref_d = construct(m, n, k, False, torch.bfloat16)
    sfa = deep_gemm.transform_sf_into_required_layout(a[1].contiguous(), m, k, (1, 128, 128), is_sfa=True)
    assert sfa.stride() == (1, align(m, 4))
    deep_gemm.fp8_gemm_nt((a[0], sfa), b, d)
    assert calc_diff(d, ref_d) < 0.001


def test_time():
    m, n, k = sizes[-1]
    a, b, c, d, _ = construct(m, n, k, False, torch.bfloat16)
    t = bench_kineto(lambda: deep_gemm.fp8_gemm_nt(a, b, d, c=c), "fp8_gemm", suppress_kineto_output=True)
    print(
        f" > Perf (m={m:5}, n={n:5}, k={k:5}): {t * 1e6:5.0f} us | "
        f"throughput: {2 * m * n * k / t / 1e12:4.0f} TFLOPS, {count_bytes(a, b, d) / 1e9 / t:4.0f} GB/s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    test_gemm()
    test_layouts()
    test_scales_as_kernels_read_them()
    test_time()
