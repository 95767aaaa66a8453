"""Layouts of scales as programs prepare them with DeepGEMM, those of Blackwell too."""

import deep_gemm
import torch
from deep_gemm.testing import bench_kineto
from deep_gemm.utils import (
    ceil_div,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    per_channel_cast_to_fp8,
    per_token_cast_to_fp8,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exponents(scales):
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def check_rows(rows, depth, groups):
    scales = per_token_cast_to_fp8(torch.randn(groups * rows, depth, device=DEVICE), use_ue8m0=True)[1]
    scales = scales.view(groups, rows, -1) if groups > 1 else scales
    for given in (scales, scales.transpose(-1, -2).contiguous().transpose(-1, -2)):
        laid = get_mn_major_tma_aligned_tensor(given)
        assert torch.equal(laid, scales)
        assert laid.stride()[-2:] == (1, get_tma_aligned_size(rows, 4))
        packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(given)
        assert packed.shape[-1] == ceil_div(scales.shape[-1], 4)
        for block in range(scales.shape[-1]):
            assert torch.equal(packed[..., block // 4] >> 8 * (block % 4) & 255, exponents(given)[..., block].int())


def check_groups(sizes, width):
    scales = per_channel_cast_to_fp8(torch.randn(sum(sizes), width, device=DEVICE), use_ue8m0=True)[1]
    on_device = torch.tensor(sizes, device=DEVICE, dtype=torch.int32)

    def pack():
        return get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scales, on_device, sizes, 128, 128)

    parts = zip(
        pack().split([ceil_div(size, 512) for size in sizes]), scales.split([s // 128 for s in sizes]), strict=True
    )
    for packed, plain in parts:
        assert torch.equal(packed[0] & 255, exponents(plain)[0].int())
    seconds = bench_kineto(pack, "pack_fp32_into_ue8m0", suppress_kineto_output=True)
    print(f"{len(sizes)} groups: {seconds * 1e6:.1f} us, {scales.nbytes / 1e9 / seconds:.3f} GB/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    for rows, depth, groups in ((64, 128, 1), (65, 640, 2), (128, 1024, 4)):
        check_rows(rows, depth, groups)
    check_groups([256, 128, 640], 72)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
