"""Products of batches in einsum notation as programs call DeepGEMM, bf16 and float8."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff, get_arch_major, ignore_env
from deep_gemm.utils.math import ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIZES = dict(zip("bhrd", (128, 8, 4096, 1024) if GPU else (5, 3, 272, 136), strict=True))


def normal(letters, spare=0):
    """A tensor of these sizes, the last columns of it left out."""
    *lead, last = (SIZES[letter] for letter in letters)
    return torch.randn(*lead, last + spare, device=DEVICE).bfloat16()[..., :last]


def check_batches():
    """Bit for bit what torch's own einsum makes, all but."""
    for expr in ("bhr,hdr->bhd", "bhd,hdr->bhr"):
        left, out = expr[:3], expr[-3:]
        x, w = normal(left), normal("hdr", spare=128)
        for own in (False, True):
            made = torch.empty([SIZES[letter] for letter in out], device=DEVICE, dtype=torch.bfloat16)
            deep_gemm.einsum(expr, x, w, made, use_cublaslt=own)
            assert calc_diff(made, torch.einsum(expr, x, w)) < 1e-10, (expr, own)


def check_one_sum():
    count, rows, columns, depth = (129, 128, 384, 128) if GPU else (9, 16, 24, 32)
    x, y = (torch.randn(count, n, depth, device=DEVICE).bfloat16() for n in (rows, columns))
    exact = torch.einsum("bmk,bnk->mn", x.float(), y.float())
    made, running = torch.empty_like(exact, dtype=torch.bfloat16), torch.randn_like(exact)
    wanted = exact + running
    deep_gemm.einsum("bmk,bnk->mn", x, y, made)
    deep_gemm.einsum("bmk,bnk->mn", x, y, running, c=running)
    assert calc_diff(made, exact) < 1e-5
    assert calc_diff(running, wanted) < 1e-5


def float8():
    x, w = normal("bhr"), normal("hdr")
    b, h, r, _ = SIZES.values()
    q, scales = per_token_cast_to_fp8(x.view(b * h, r), use_ue8m0=True)
    of_w = [per_block_cast_to_fp8(each, use_ue8m0=True) for each in w]
    stacked = torch.stack([each.view(torch.uint8) for each, _ in of_w]).view(q.dtype)
    pair = stacked, torch.stack([of_each for _, of_each in of_w])
    return (q.view(b, h, r), scales.view(b, h, ceil_div(r, 128))), pair, torch.einsum("bhr,hdr->bhd", x, w)


@ignore_env("SOME_SWITCH", lambda: get_arch_major() == 9)
def check_float8():
    x, w, exact = float8()
    made = torch.empty_like(exact)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x, w, made)
    assert calc_diff(made, exact) < 1e-3


def time_one():
    x, w, made = float8()
    seconds = bench_kineto(
        lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", x, w, made), "gemm_", suppress_kineto_output=True
    )
    b, h, r, d = SIZES.values()
    print(f"bhr,hdr->bhd: {seconds * 1e6:.1f} us, {2e-12 * b * h * r * d / seconds:.2f} TFLOPS")


if __name__ == "__main__":
    torch.manual_seed(0)
    check_batches()
    check_one_sum()
    check_float8()
    time_one()
