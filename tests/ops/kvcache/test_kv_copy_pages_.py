"""kv_copy_pages_ copies whole pages, leaves all others, and skips pairs that are left out."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.errors import InputError
from tilewright.ops import kv_copy_pages_
from tilewright.validate.bits import same_bits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


@st.composite
def pairs(draw):
    """(pages, src, dst): distinct pages of dst, none of them in src; negative entries for pairs left out."""
    pages = draw(st.integers(2, 9))
    order = draw(st.permutations(range(pages)))
    count = draw(st.integers(0, pages - 1))
    dst = list(order[:count])
    src = [draw(st.sampled_from(order[count:])) for _ in dst]
    for i in range(count):
        left_out = draw(st.sampled_from(["no", "no", "src", "dst"]))
        src[i], dst[i] = (-1 if left_out == "src" else src[i]), (-3 if left_out == "dst" else dst[i])
    return pages, src, dst


@pytest.mark.parametrize("backend", BACKENDS)
@given(drawn=pairs(), page_size=st.sampled_from([1, 3, 16]), e4m3=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_are_copied_and_no_other_is_written(backend, drawn, page_size, e4m3):
    pages, src, dst = drawn
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    caches = [torch.randn(pages, page_size, 2, d).to(dtype) for d in (8, 5)]
    scales = [torch.rand(pages, page_size, 2) for _ in caches] if e4m3 else []
    wanted = [t.clone() for t in (*caches, *scales)]
    for s, d in zip(src, dst, strict=True):
        if s >= 0 and d >= 0:
            for t in wanted:
                t[d] = t[s].clone()
    options = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    indices = (torch.tensor(t, dtype=torch.int32) for t in (src, dst))
    assert kv_copy_pages_(*caches, *indices, **options, backend=backend) is None
    assert all(same_bits(made, kept) for made, kept in zip((*caches, *scales), wanted, strict=True))


@pytest.mark.parametrize(
    ("src", "dst", "match"),
    [([0, 1], [2, 2], "there twice"), ([0, 2], [2, 3], "in src too"), ([0], [4], "reach to 4; needs 0 to 3")],
)
def test_pairs_without_one_meaning_are_refused_on_a_cpu(src, dst, match):
    cache = torch.randn(4, 2, 1, 2)
    before = cache.clone()
    with pytest.raises(InputError, match=match):
        kv_copy_pages_(cache, cache.clone(), *(torch.tensor(t, dtype=torch.int32) for t in (src, dst)))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_outside_of_the_cache_are_left_out_where_no_check_reads(backend, monkeypatch):
    monkeypatch.setattr("tilewright.ops.kvcache.checks.may_read", lambda t: False)
    cache = torch.randn(4, 2, 1, 2)
    v_cache, wanted = cache.clone(), cache.clone()
    wanted[3] = wanted[1]
    src, dst = (torch.tensor(t, dtype=torch.int32) for t in ([0, 99, 1], [2147480000, 2, 3]))
    kv_copy_pages_(cache, v_cache, src, dst, backend=backend)
    assert torch.equal(cache, wanted)
    assert torch.equal(v_cache, wanted)
