"""Names that the test files of DeepGEMM 2.6 for Hopper import, and their calls with the arguments that they give.

The sizes are theirs, on fake tensors: nothing is multiplied, but all that a call checks, chooses and promises runs.
What comes out is compared with numbers in the other files of this folder, on smaller sizes.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm import utils

IMPORTED = {
    "testing": "bench bench_kineto calc_diff count_bytes get_arch_major ignore_env test_filter assert_bitwise_equal",
    "utils": "align ceil_div per_token_cast_to_fp8 per_channel_cast_to_fp8 per_block_cast_to_fp8 per_token_cast_to_fp4 "
    "transpose_packed_fp4 get_mk_alignment_for_contiguous_layout set_mk_alignment_for_contiguous_layout "
    "get_tma_aligned_size get_mn_major_tma_aligned_tensor get_mn_major_tma_aligned_packed_ue8m0_tensor "
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "utils.math": "ceil_div align cast_back_from_fp8 per_block_cast_to_fp8 per_channel_cast_to_fp8 "
    "per_token_cast_to_fp8",
}
NK = [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
GROUPS_NK = [(6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)]
COUNTS = (300, 1, 128, 700)  # of groups of rows
F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
AS_THERE: dict[str, Any] = {"recipe": None, "recipe_a": None, "recipe_b": None, "disable_ue8m0_cast": True}

Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    kept = deep_gemm.get_mk_alignment_for_contiguous_layout()
    with FakeTensorMode():
        yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(kept)


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def tokens(*shape: int) -> Pair:
    """e4m3 and a scale for 128 of a row, as the casts make them."""
    q, scales = utils.per_token_cast_to_fp8(bf16(*shape).view(-1, shape[-1]), use_ue8m0=False, gran_k=128)
    return q.view(shape), scales.view(*shape[:-1], -1)


def blocks(*shape: int) -> Pair:
    """e4m3 and a scale for 128x128, filled matrix by matrix."""
    if len(shape) == 2:
        return utils.per_block_cast_to_fp8(bf16(*shape), use_ue8m0=False, gran_k=128)
    scales = torch.empty(shape[0], *(utils.ceil_div(size, 128) for size in shape[1:]))
    q = torch.empty(shape, dtype=E4M3)
    for g in range(shape[0]):
        q[g], scales[g] = utils.per_block_cast_to_fp8(bf16(*shape[1:]), use_ue8m0=False, gran_k=128)
    return q, scales


@pytest.mark.parametrize("module", IMPORTED)
def test_what_they_import_is_here(module: str) -> None:
    found = importlib.import_module(f"tilewright.compat.deep_gemm.{module}")
    assert [name for name in IMPORTED[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", ["use_deterministic_algorithms", "batched_syrk", "batched_symm"])
def test_what_later_releases_import_says_so(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no {name!r}: DeepGEMM has it since a release after 2.6.1"):
        getattr(deep_gemm, name)


@pytest.mark.parametrize(("n", "k"), [*NK, (256, 7168), (129280, 7168)])
@pytest.mark.parametrize("m", [1, 128, 4096])
@pytest.mark.parametrize("form", ["bf16_gemm", "cublaslt_gemm"])
def test_dense(form: str, m: int, n: int, k: int) -> None:
    for dtype in (BF16, F32):
        d = torch.empty(m, n, dtype=dtype)
        getattr(deep_gemm, f"{form}_nt")(bf16(m, k), bf16(n, k), d, c=d)
        getattr(deep_gemm, f"{form}_nt")(bf16(k, m).T, bf16(k, n).T, d, c=None)
        for layout in ("nt", "nn", "tn", "tt"):
            a = bf16(k, m) if layout[0] == "t" else bf16(m, k)
            b = bf16(n, k) if layout[1] == "t" else bf16(k, n)
            getattr(deep_gemm, f"{form}_{layout}")(a, b, d, c=None)


@pytest.mark.parametrize(("n", "k"), NK)
@pytest.mark.parametrize("m", [1, 128, 4096])
def test_dense_float8(m: int, n: int, k: int) -> None:
    """Forward with blocks of weights; the gradient of weights with rows of both; cuBLAS over the bare operands."""
    a, d = tokens(m, k), bf16(m, n)
    deep_gemm.fp8_fp4_gemm_nt(a, blocks(n, k), d, c=None, **AS_THERE)
    sums = torch.empty(m, n)
    deep_gemm.fp8_fp4_gemm_nt(a, tokens(n, k), sums, c=sums, **AS_THERE | {"recipe": (1, 1, 128)})
    for out in (d, sums):
        deep_gemm.cublaslt_gemm_nt(a[0], tokens(n, k)[0], out, c=None)
        deep_gemm.cublaslt_gemm_nt(a[0], tokens(n, k)[0], out, c=out)


@pytest.mark.parametrize(("n", "k"), GROUPS_NK)
@pytest.mark.parametrize("by_ends", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "fp8_fp4"])
def test_groups_of_rows(kind: str, by_ends: bool, n: int, k: int) -> None:
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    rows = sum(utils.align(count, alignment) for count in COUNTS)
    layout = torch.empty(len(COUNTS) if by_ends else rows, dtype=torch.int32)
    cast: Callable[..., Any] = bf16 if kind == "bf16" else tokens
    weights: Callable[..., Any] = bf16 if kind == "bf16" else blocks
    a, b, d = cast(rows, k), weights(len(COUNTS), n, k), bf16(rows, n)
    options = {"use_psum_layout": by_ends, "ensure_zero_padding": False} | ({} if kind == "bf16" else AS_THERE)
    nt = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
    nt(a, b, d, layout, **options)
    if by_ends:
        options.pop("ensure_zero_padding")
        nt(a, b, d, layout, expected_m_for_psum_layout=230, **options)
    elif kind == "bf16":
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, bf16(len(COUNTS), k, n), d, layout, **options)
        nt(a, bf16(len(COUNTS), k, n).mT, d, layout, **options)


@pytest.mark.parametrize(("n", "k"), GROUPS_NK)
@pytest.mark.parametrize("kind", ["bf16", "fp8_fp4"])
def test_groups_behind_a_mask(kind: str, n: int, k: int) -> None:
    groups, most, expected = 6, 4096, 1228
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected)
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    counts, d = torch.empty(groups, dtype=torch.int32), bf16(groups, most, n)
    if kind == "bf16":
        deep_gemm.m_grouped_bf16_gemm_nt_masked(bf16(groups, most, k), bf16(groups, n, k), d, counts, expected)
    else:
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
            tokens(groups, most, k), blocks(groups, n, k), d, counts, expected, **AS_THERE
        )


@pytest.mark.parametrize("ks", [[8192, 5760, 10624, 128], [0, 2048, 2688], [0, 0, 1408, 0]], ids=str)
def test_groups_along_k(ks: list[int]) -> None:
    m, n, k = 4096, 7168, sum(ks)
    sizes, c = torch.empty(len(ks), dtype=torch.int32), torch.empty(len(ks), m, n)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(bf16(k, m), bf16(k, n), c, ks, sizes, c, use_psum_layout=False)
    a, b = ((torch.empty(k * rows, dtype=E4M3), torch.empty(k // 128, rows).T) for rows in (m, n))
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, c, ks, sizes, c, recipe=(1, 1, 128), use_psum_layout=False)


@pytest.mark.parametrize("use_cublaslt", [False, True])
@pytest.mark.parametrize("b", [4, 128, 8192])
@pytest.mark.parametrize(("h", "r", "d"), [(128, 512, 128), (8, 4096, 1024)])
def test_einsums(h: int, r: int, d: int, b: int, use_cublaslt: bool) -> None:
    x, narrow, weights = bf16(b, h, r), bf16(b, h, d), bf16(h, d, r + 128)[:, :, :r]
    deep_gemm.einsum("bhr,hdr->bhd", x, weights, bf16(b, h, d), use_cublaslt=use_cublaslt)
    deep_gemm.einsum("bhd,hdr->bhr", narrow, weights, bf16(b, h, r), use_cublaslt=use_cublaslt)
    z = torch.empty(h, d, r)
    deep_gemm.einsum("bhd,bhr->hdr", narrow, x, z, z)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", tokens(b, h, r), blocks(h, d, r), bf16(b, h, d))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("s", [129, 8192])
def test_a_sum_over_a_batch(s: int, dtype: torch.dtype) -> None:
    d = torch.empty(128, 384, dtype=dtype)
    deep_gemm.einsum("bmk,bnk->mn", bf16(s, 128, 256), bf16(s, 384, 256), d, c=d if dtype == F32 else None)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("k", [128, 7168, 7296])
@pytest.mark.parametrize("mn", [4096, 4097, 8192])
def test_layouts_of_scales(mn: int, k: int, groups: int) -> None:
    shape = (mn, k) if groups == 1 else (groups, mn, k)
    for scales in (tokens(*shape)[1], tokens(*shape)[1].mT.contiguous().mT):
        lines, count = utils.get_tma_aligned_size(mn, scales.element_size()), utils.ceil_div(k, 128)
        laid = utils.get_mn_major_tma_aligned_tensor(scales)
        packed = utils.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
        assert (laid.shape, laid.stride()[-2:]) == (scales.shape, (1, lines))
        assert (packed.shape[-2:], packed.stride()[-2:]) == ((mn, utils.ceil_div(count, 4)), (1, lines))
        assert groups == 1 or laid.stride(0) == lines * count


def test_packed_scales_of_groups_along_k() -> None:
    ks, rows = [2048, 256, 384], 4096
    q, scales = utils.per_channel_cast_to_fp8(bf16(sum(ks), rows), use_ue8m0=True, gran_k=128)
    packed = utils.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scales, torch.empty(3, dtype=torch.int32), ks, 128, 128
    )
    assert q.shape == (sum(ks), rows)
    assert packed.shape == (sum(utils.ceil_div(k, 512) for k in ks), rows)


def test_a_size_may_be_a_tensor() -> None:
    """Ends of groups are rounded up as they lie on the device."""
    end = torch.empty((), dtype=torch.int32)
    assert utils.align(end, deep_gemm.get_mk_alignment_for_contiguous_layout()).dtype == torch.int32
