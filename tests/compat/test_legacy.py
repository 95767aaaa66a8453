"""`legacy`: products of groups whose rows are gathered, against float64."""

import pytest
import torch
from tests.compat.fp8 import assert_rounded

from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm import legacy
from tilewright.errors import InputError

G, T, M, N, K = 3, 256, 24, 40, 32


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ids() -> torch.Tensor:
    groups = torch.full((T,), -1, dtype=torch.int32)
    groups[:100], groups[128:] = 0, 2
    return groups


@pytest.mark.parametrize("trans", ["nt", "nn"])
def test_groups_of_rows(trans):
    a, b, groups = numbers(T, K), numbers(G, N, K, seed=2), ids()
    a[groups == -1] = 0
    d = torch.full((T, N), float("nan")).bfloat16()
    getattr(legacy, f"m_grouped_bf16_gemm_{trans}_contiguous_tl")(a, b if trans == "nt" else b.mT, d, groups)
    exact = torch.einsum("tk,tnk->tn", a.double(), b.double()[groups.clamp(0).long()])
    assert_rounded(d, exact)


@pytest.mark.parametrize("trans", ["nt", "nn"])
def test_groups_of_gathered_rows(trans):
    a, b, groups = numbers(50, K), numbers(G, N, K, seed=2), ids()
    rows = torch.randint(-1, 50, (T,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    rows[groups == -1] = -1
    d = torch.full((T, N), float("nan")).bfloat16()
    function = getattr(deep_gemm.legacy, f"a_fused_m_grouped_bf16_gemm_{trans}_contiguous_tl")
    function(a, b if trans == "nt" else b.mT, d, (groups, rows))
    taken = a.double()[rows.clamp(0).long()] * (rows >= 0)[:, None]
    assert_rounded(d, torch.einsum("tk,tnk->tn", taken, b.double()[groups.clamp(0).long()]))


@pytest.mark.parametrize("acc", [False, True])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_sums_over_groups_of_gathered_rows(operand, acc):
    """A group without places, and places between two groups that belong to none."""
    starts, ends = [0, 100, 100, 180], [100, 100, 150, T]
    rows = torch.randint(-1, 50, (T,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    a, b = numbers(50 if operand == "a" else T, M), numbers(50 if operand == "b" else T, N, seed=2)
    (a if operand == "b" else b)[150:180] = float("nan")
    handle = rows, torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    d = torch.randn(4, M, N)
    before = d.double() if acc else 0
    getattr(legacy, f"{operand}_fused_k_grouped_bf16_gemm_tn_contiguous_tl")(a, b, d, handle, acc)
    source = (a if operand == "a" else b).double()
    taken = source[rows.clamp(0).long()] * (rows >= 0)[:, None]
    left, right = (taken, b.double()) if operand == "a" else (a.double(), taken)
    spans = zip(starts, ends, strict=True)
    assert_rounded(d, torch.stack([left[start:end].mT @ right[start:end] for start, end in spans]) + before)


def test_what_is_refused():
    a, b, d = numbers(T, K), numbers(G, N, K), torch.empty(T, N)
    with pytest.raises(InputError, match=r"rows are torch.int64; needs torch.int32"):
        legacy.a_fused_m_grouped_bf16_gemm_nt_contiguous_tl(a, b, d, (ids(), ids().long()))
    places = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InputError, match=r"starts is \(2,\) torch.int32; needs \(3,\)"):
        legacy.b_fused_k_grouped_bf16_gemm_tn_contiguous_tl(
            a, numbers(9, N), torch.empty(G, K, N), (ids(), places, places), False
        )
    with pytest.raises(AttributeError, match="legacy has no 'get_m_grouped_gemm_configs'"):
        _ = legacy.get_m_grouped_gemm_configs
