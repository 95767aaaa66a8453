"""Dense bf16 products as programs call DeepGEMM: `test_deep_gemm.py` runs the files of this folder with nothing but the
library's name in their imports changed.  Each checks its results and prints a time.
"""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, get_arch_major, test_filter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(1, 2112, 7168), (128, 7168, 2048), (4096, 4096, 7168)] if GPU else [(1, 64, 48), (33, 40, 64)]


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def check_layouts(product, shape, limit):
    """All four layouts, into bf16 and float32, with and without a sum that is already there."""
    rows, columns, depth = shape
    left, right = normal(rows, depth), normal(depth, columns)
    exact = left.float() @ right.float()
    for layout in ("nt", "nn", "tn", "tt"):
        a = left if layout[0] == "n" else left.T.contiguous()
        b = right if layout[1] == "n" else right.T.contiguous()
        call = getattr(deep_gemm, f"{product}_{layout}")
        for dtype in (torch.bfloat16, torch.float32):
            fresh = torch.empty(rows, columns, device=DEVICE, dtype=dtype)
            call(a, b, fresh)
            assert calc_diff(fresh, exact) < max(limit, 1e-5 * (dtype == torch.bfloat16)), (layout, dtype, shape)
            running = normal(rows, columns, dtype=dtype) * 32
            wanted = exact + running.float()
            call(a, b, running, c=running)
            assert calc_diff(running, wanted) < 1e-5, (layout, dtype, shape)


@test_filter(lambda: get_arch_major() >= 9)
def check_half_the_machine():
    whole = deep_gemm.get_num_sms()
    for count in (whole // 2, whole - 1):  # an odd number among them
        deep_gemm.set_num_sms(count)
        assert deep_gemm.get_num_sms() == count
        check_layouts("bf16_gemm", SHAPES[-1], 1e-5)
    deep_gemm.set_num_sms(whole)


def time_one():
    rows, columns, depth = SHAPES[-1]
    a, b, d = normal(rows, depth), normal(columns, depth), normal(rows, columns)
    for name in ("bf16_gemm", "cublaslt_gemm"):
        call = getattr(deep_gemm, f"{name}_nt")
        seconds = bench_kineto(lambda call=call: call(a, b, d), "gemm_", suppress_kineto_output=True)
        print(f"{name}: {seconds * 1e6:.1f} us, {2e-12 * rows * columns * depth / seconds:.2f} TFLOPS")


if __name__ == "__main__":
    torch.manual_seed(0)
    deep_gemm.set_pdl(deep_gemm.get_pdl())
    for shape in SHAPES:
        check_layouts("bf16_gemm", shape, 1e-5)
        check_layouts("cublaslt_gemm", shape, 6e-7)
    check_half_the_machine()
    time_one()
