"""Dense bf16 products, in the manner of DeepGEMM's own tests and of its users: `test_deep_gemm.py` runs the programs of
this folder with nothing but the library's name in the imports changed.
"""

import random

import deep_gemm
import torch
from deep_gemm import ceil_div
from deep_gemm.testing import bench_kineto, calc_diff, count_bytes

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = (
    [(m, n, k) for m in (1, 128, 4096) for n, k in ((2112, 7168), (7168, 2048))]
    if device == "cuda"
    else [(1, 64, 48), (33, 40, 64)]
)


def construct(m, n, k, trans_a, trans_b, accumulate, out_dtype):
    a = torch.randn((k, m) if trans_a else (m, k), device=device, dtype=torch.bfloat16)
    b = torch.randn((n, k) if trans_b else (k, n), device=device, dtype=torch.bfloat16)
    d = torch.randn((m, n), device=device, dtype=out_dtype) * 32 if accumulate else torch.empty(
        (m, n), device=device, dtype=out_dtype
    )  # fmt: skip
    c = d if accumulate else None
    ref_d = ((a.T if trans_a else a).float() @ (b.T if trans_b else b).float() + (c if accumulate else 0)).to(out_dtype)
    return a, b, c, d, ref_d


def test_gemm():
    for m, n, k in sizes:
        for layout in ("nt", "nn", "tn", "tt"):
            for accumulate, out_dtype in ((False, torch.bfloat16), (False, torch.float), (True, torch.float)):
                a, b, c, d, ref_d = construct(m, n, k, layout[0] == "t", layout[1] == "t", accumulate, out_dtype)
                getattr(deep_gemm, f"bf16_gemm_{layout}")(a, b, d, c=c)
                diff = calc_diff(d, ref_d)
                assert diff < 1e-5, f"{m=}, {n=}, {k=}, {layout}, {accumulate=}, {out_dtype=}, {diff:.5f}"


def test_gemm_with_fewer_sms():
    everything = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(everything // 4 * 2)
    assert deep_gemm.get_num_sms() == everything // 4 * 2
    m, n, k = sizes[-1]
    a, b, c, d, ref_d = construct(m, n, k, False, True, False, torch.bfloat16)
    deep_gemm.bf16_gemm_nt(a, b, d, c=c)
    assert calc_diff(d, ref_d) < 1e-5
    deep_gemm.set_num_sms(everything)


def test_time():
    m, n, k = sizes[-1]
    a, b, c, d, _ = construct(m, n, k, False, True, False, torch.bfloat16)

    # noinspection PyShadowingNames
    def test_func():
        deep_gemm.bf16_gemm_nt(a, b, d, c=c)

    t = bench_kineto(test_func, "bf16_gemm", suppress_kineto_output=True)
    print(
        f" > Perf (m={m:5}, n={n:5}, k={k:5}): {t * 1e6:5.0f} us | "
        f"throughput: {2 * m * n * k / t / 1e12:4.0f} TFLOPS, {count_bytes(a, b, d) / 1e9 / t:4.0f} GB/s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    assert ceil_div(sizes[-1][1], 128) * 128 >= sizes[-1][1]

    test_gemm()
    test_gemm_with_fewer_sms()
    test_time()
