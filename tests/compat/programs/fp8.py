"""Dense float8 products as programs call DeepGEMM: casts, layers forward, gradients of weights that accumulate."""

import deep_gemm
import torch
from deep_gemm.testing import assert_bitwise_equal, bench_kineto, calc_diff, count_bytes
from deep_gemm.utils import ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(1, 2112, 7168), (128, 7168, 2048), (4096, 4096, 7168)] if GPU else [(1, 64, 128), (33, 144, 272)]
LIMIT = 1e-3  # of float8 against the numbers before the cast


def problem(rows, columns, depth, cast):
    """Float8 pairs of A (rows, depth) and B (columns, depth), and their product in float32."""
    a, b = (torch.randn(n, depth, device=DEVICE).bfloat16() for n in (rows, columns))
    return per_token_cast_to_fp8(a, use_ue8m0=False), cast(b, use_ue8m0=False), a.float() @ b.float().T


def check_layers(shape):
    rows, columns, _ = shape
    a, b, exact = problem(*shape, per_block_cast_to_fp8)
    for layout in ("nt", "nn", "tn", "tt"):
        left = a if layout[0] == "n" else (a[0].T.contiguous(), a[1].T)
        right = b if layout[1] == "t" else (b[0].T.contiguous(), b[1].T)
        made = torch.empty(rows, columns, device=DEVICE, dtype=torch.bfloat16)
        getattr(deep_gemm, f"fp8_gemm_{layout}")(left, right, made, disable_ue8m0_cast=True)
        assert calc_diff(made, exact) < LIMIT, (layout, shape)
        again = torch.empty_like(made)
        getattr(deep_gemm, f"fp8_fp4_gemm_{layout}")(left, right, again, disable_ue8m0_cast=True)
        assert_bitwise_equal(made, again)


def check_gradients(shape):
    a, b, exact = problem(*shape, per_token_cast_to_fp8)
    running = torch.randn_like(exact) * 32
    wanted = exact + running
    deep_gemm.fp8_gemm_nt(a, b, running, c=running, recipe=(1, 1, 128))
    assert calc_diff(running, wanted) < LIMIT, shape


def check_scales(shape):
    """Scales that are viewed, then laid out once."""
    rows, columns, depth = shape
    (q, scales), b, exact = problem(*shape, per_block_cast_to_fp8)
    seen = scales.view(-1).view(rows, ceil_div(depth, 128))
    laid = deep_gemm.transform_sf_into_required_layout(seen, rows, depth, (1, 128, 128), is_sfa=True)
    assert laid.stride(0) == 1
    made = torch.empty(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((q, laid), b, made)
    assert calc_diff(made, exact) < LIMIT, shape


def time_one():
    rows, columns, depth = SHAPES[-1]
    a, b, exact = problem(rows, columns, depth, per_block_cast_to_fp8)
    made = exact.bfloat16()
    seconds = bench_kineto(lambda: deep_gemm.fp8_gemm_nt(a, b, made), "fp8_gemm", suppress_kineto_output=True)
    print(f"fp8_gemm_nt: {seconds * 1e6:.1f} us, {count_bytes(a, b, made) / 1e9 / seconds:.2f} GB/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    for shape in SHAPES:
        check_layers(shape)
        check_gradients(shape)
        check_scales(shape)
    time_one()
