"""Products of groups of rows under DeepGEMM's names, against float64 products group by group."""

import pytest
import torch
from tests.compat.fp8 import assert_rounded, block, token

from tilewright.compat import deep_gemm
from tilewright.errors import InputError

G, N, K, GAP = 4, 144, 160, 7.0
ROWS = (5, 0, 130, 9)  # of each group


@pytest.fixture(autouse=True)
def alignment():
    yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def operands(kind: str, trans: str, rows: int, *batch: int):
    """(a, b) as passed, and their values in float64: a (*batch, rows, K), b (G, N, K)."""
    if kind == "bf16":
        g = torch.Generator().manual_seed(3)
        a, b = (torch.randn(shape, generator=g).bfloat16() for shape in ((*batch, rows, K), (G, N, K)))
        left, right = a.double(), b.double()
        return a, (b if trans == "nt" else b.mT.contiguous()), left, right
    (a, left), (b, right) = token(*batch, rows, K), block(G, N, K)
    return a, (b if trans == "nt" else tuple(t.mT.contiguous() for t in b)), left, right


def aligned(rows: int, to: int) -> int:
    return -(-rows // to) * to


def contiguous(kind: str, trans: str):
    return getattr(deep_gemm, f"m_grouped_{kind}_gemm_{trans}_contiguous")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("padding", [1, 128], ids=["tight", "padded"])
@pytest.mark.parametrize("psum", [False, True], ids=["ids", "ends"])
@pytest.mark.parametrize("trans", ["nt", "nn"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_groups_behind_each_other(kind, trans, psum, padding, dtype):
    deep_gemm.set_mk_alignment_for_contiguous_layout(padding)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == padding
    total = sum(aligned(rows, padding) for rows in ROWS)
    a, b, left, right = operands(kind, trans, total)
    ids, ends = torch.full((total,), -1, dtype=torch.int32), torch.empty(G, dtype=torch.int32)
    exact, at = torch.full((total, N), GAP, dtype=torch.float64), 0
    for g, rows in enumerate(ROWS):
        ids[at : at + rows] = g
        ends[g] = at + rows
        to = at + aligned(rows, padding)
        exact[at:to] = left[at:to] @ right[g].mT
        at = to
    d = torch.full((total, N), GAP, dtype=dtype)
    contiguous(kind, trans)(a, b, d, ends if psum else ids, use_psum_layout=psum)
    assert_rounded(d, exact)


@pytest.mark.parametrize("psum", [False, True], ids=["ids", "ends"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_zeros_as_padding_give_zeros(kind, psum):
    """What programs compare whole: a has zeros behind each group, and d comes uninitialised."""
    a, b, left, right = operands(kind, "nt", 512)
    values = a if kind == "bf16" else a[0].view(torch.uint8)
    ids = torch.full((512,), -1, dtype=torch.int32)
    exact = torch.zeros(512, N, dtype=torch.float64)
    for start, end, g in ((0, 100, 0), (128, 130, 2), (256, 500, 3)):  # group 1 has no rows
        ids[start:end] = g
        exact[start:end] = left[start:end] @ right[g].mT
    values[ids == -1] = 0
    ends = torch.tensor([100, 128, 130, 500], dtype=torch.int32)
    d = torch.full((512, N), float("nan")).bfloat16()
    contiguous(kind, "nt")(a, b, d, ends if psum else ids, use_psum_layout=psum)
    assert_rounded(d, exact)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_may_call_it(dynamic):
    def step(a, b, d, layout, psum):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum)
        return d + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (256, 384):
        a, b, *_ = operands("bf16", "nt", rows)
        ids = torch.full((rows,), -1, dtype=torch.int32)
        ids[:100], ids[128:200] = 0, 3
        for layout, psum in ((ids, False), (torch.tensor([100, 128, 128, 200], dtype=torch.int32), True)):
            d, eager = torch.full((rows, N), GAP), torch.full((rows, N), GAP)
            assert torch.equal(compiled(a, b, d, layout, psum), step(a, b, eager, layout, psum))
            assert torch.equal(d, eager)


def test_padding_ends_where_the_next_group_begins():
    """Groups that begin anywhere, in any order: 20 rows of group 2, 5 of padding, then group 0, and nothing behind."""
    a, b, left, right = operands("bf16", "nt", 300)
    ids = torch.full((300,), -1, dtype=torch.int32)
    ids[:20], ids[25:60] = 2, 0
    exact = torch.full((300, N), GAP, dtype=torch.float64)
    exact[:25], exact[25:128] = left[:25] @ right[2].mT, left[25:128] @ right[0].mT
    d = torch.full((300, N), GAP)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids)
    assert_rounded(d, exact)


@pytest.mark.parametrize("alignment", [48, 64, 224])
def test_alignments_of_any_size(alignment):
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    rows = 3 * alignment - 10  # the last multiple is beyond the rows there are
    a, b, left, right = operands("bf16", "nt", rows)
    ends = torch.tensor([9, 9, alignment + 7, 2 * alignment + 3], dtype=torch.int32)
    exact = torch.empty(rows, N, dtype=torch.float64)
    for g, start, end in ((0, 0, alignment), (2, alignment, 2 * alignment), (3, 2 * alignment, rows)):
        exact[start:end] = left[start:end] @ right[g].mT
    d = torch.full((rows, N), GAP)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)
    assert_rounded(d, exact)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_first_rows_of_each_matrix(kind):
    rows = torch.tensor([0, 3, 16, 1], dtype=torch.int32)
    a, b, left, right = operands(kind, "nt", 16, G)
    d = torch.full((G, 16, N), GAP, dtype=torch.bfloat16)
    getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")(a, b, d, rows, 4)
    inside = torch.arange(16) < rows[:, None]
    assert_rounded(d[inside], (left @ right.mT)[inside])
    assert (d[~inside] == GAP).all()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_nothing_to_multiply(kind):
    a, b, *_ = operands(kind, "nt", 0)
    contiguous(kind, "nt")(a, b, torch.empty(0, N).bfloat16(), torch.empty(0, dtype=torch.int32))


def test_former_and_general_names_are_the_same_functions():
    assert deep_gemm.fp8_m_grouped_gemm_nt_masked is deep_gemm.m_grouped_fp8_gemm_nt_masked
    assert deep_gemm.bf16_m_grouped_gemm_nt_masked is deep_gemm.m_grouped_bf16_gemm_nt_masked
    assert deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous is deep_gemm.m_grouped_fp8_gemm_nt_contiguous


def test_a_gradient_that_would_be_lost_is_refused():
    a, b, *_ = operands("bf16", "nt", 4)
    with pytest.raises(InputError, match="gradient"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
            a, b.requires_grad_(), torch.empty(4, N).bfloat16(), torch.zeros(4, dtype=torch.int32)
        )


T = 12
A, B, *_ = operands("fp8", "nt", T)
IDS = torch.zeros(T, dtype=torch.int32)
D = torch.full((T, N), GAP).bfloat16()
BAD = {
    "ids of 64 bits": ((A, B, D, IDS.long()), {}, r"grouped_layout is \(12,\) torch.int64; needs \(12,\) torch.int32"),
    "ends without saying so": ((A, B, D, IDS[:G]), {}, "one number a row, or use_psum_layout the other way round"),
    "ids that say they are ends": ((A, B, D, IDS), {"use_psum_layout": True}, r"needs \(4,\) .* one number a group"),
    "one b for all": ((A, tuple(t[0] for t in B), D, IDS), {}, r"b is \(144, 160\); needs three dimensions"),
    "scales of one group": ((A, (B[0], B[1][:1]), D, IDS), {}, r"the scales of b are \(1, 2, 2\)"),
    "d is too narrow": ((A, B, D[:, 8:], IDS), {}, r"d is \(12, 136\); needs \(T, N\) = \(12, 144\)"),
    "a is bf16": (((A[0].bfloat16(), A[1]), B, D, IDS), {}, "a is torch.bfloat16; needs torch.float8"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_refused(args, options, message):
    with pytest.raises(InputError, match=message):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*args, **options)
    assert (D == GAP).all()


def test_what_is_refused_of_masks():
    a, b, *_ = operands("bf16", "nt", 6, G)
    d, rows = torch.empty(G, 6, N).bfloat16(), torch.zeros(G, dtype=torch.int32)
    with pytest.raises(InputError, match=r"masked_m is \(3,\)"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, rows[1:], 2)
    with pytest.raises(InputError, match="expected_m is 0"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, rows, 0)
    with pytest.raises(InputError, match="a has 3 groups, b has 4"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a[1:], b, d, rows, 2)
