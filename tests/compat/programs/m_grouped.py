"""Layers of experts as programs call DeepGEMM: groups of rows, padded or behind a mask, bf16 and float8."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto, calc_diff
from deep_gemm.utils import align, get_mk_alignment_for_contiguous_layout, per_block_cast_to_fp8, per_token_cast_to_fp8

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS, WIDTH, DEPTH = ([900, 0, 1300, 128, 1], 4096, 2048) if GPU else ([9, 0, 130, 128, 1], 144, 256)
LIMITS = {"bf16": 1e-5, "fp8": 1e-3}


def normal(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def tokens(x):
    """Of (..., rows, depth) the float8 pair with a scale for 128 of a row."""
    q, scales = per_token_cast_to_fp8(x.flatten(0, -2), use_ue8m0=False)
    return q.view(x.shape), scales.view(*x.shape[:-1], -1)


def weights(w):
    pairs = [per_block_cast_to_fp8(each, use_ue8m0=False) for each in w]
    return torch.stack([q.view(torch.uint8) for q, _ in pairs]).view(pairs[0][0].dtype), torch.stack(
        [scales for _, scales in pairs]
    )


def as_kind(kind, x, w):
    return (x, w) if kind == "bf16" else (tokens(x), weights(w))


def padded_groups():
    """x with zeros behind each group up to the alignment, w, the group of each row, the end of each, and x @ w.T."""
    whole = [align(count, get_mk_alignment_for_contiguous_layout()) for count in TOKENS]
    x, w = normal(sum(whole), DEPTH), normal(len(TOKENS), WIDTH, DEPTH)
    owner, ends, exact = [], [], []
    for expert, (count, length) in enumerate(zip(TOKENS, whole, strict=True)):
        first = len(owner)
        x[first + count : first + length] = 0
        owner += [expert] * count + [-1] * (length - count)
        ends.append(first + count)
        exact.append(x[first : first + length].float() @ w[expert].float().T)
    return x, w, *(torch.tensor(t, device=DEVICE, dtype=torch.int32) for t in (owner, ends)), torch.cat(exact)


def check_padded(kind):
    x, w, owner, ends, exact = padded_groups()
    a, b = as_kind(kind, x, w)
    call = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
    for layout, by_ends in ((owner, False), (ends, True)):
        made = torch.full(exact.shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)
        call(a, b, made, layout, use_psum_layout=by_ends)
        assert calc_diff(made, exact) < LIMITS[kind], (kind, by_ends)  # rows of padding too


def check_masked(kind):
    most = max(TOKENS) + 30
    x, w = normal(len(TOKENS), most, DEPTH), normal(len(TOKENS), WIDTH, DEPTH)
    counts = torch.tensor(TOKENS, device=DEVICE, dtype=torch.int32)
    inside = torch.arange(most, device=DEVICE) < counts[:, None]
    made = torch.empty(len(TOKENS), most, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")(*as_kind(kind, x, w), made, counts, max(TOKENS) // 2)
    exact = x.float() @ w.float().mT
    assert calc_diff(made[inside], exact[inside]) < LIMITS[kind], kind


def check_legacy():
    x, w, owner, _, exact = padded_groups()
    shuffled = torch.randperm(x.shape[0], device=DEVICE)
    made = torch.empty(exact.shape, device=DEVICE, dtype=torch.bfloat16)
    handle = owner, shuffled.argsort().int()
    deep_gemm.legacy.a_fused_m_grouped_bf16_gemm_nt_contiguous_tl(x[shuffled], w, made, handle)
    assert calc_diff(made, exact) < LIMITS["bf16"]


def time_one():
    x, w, owner, _, exact = padded_groups()
    a, b, made = tokens(x), weights(w), exact.bfloat16()
    seconds = bench_kineto(
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, made, owner), "fp8_gemm", suppress_kineto_output=True
    )
    print(f"{len(TOKENS)} groups: {seconds * 1e6:.1f} us, {2e-12 * x.numel() * WIDTH / seconds:.2f} TFLOPS")


if __name__ == "__main__":
    torch.manual_seed(0)
    for kind in LIMITS:
        check_padded(kind)
        check_masked(kind)
    check_legacy()
    time_one()
