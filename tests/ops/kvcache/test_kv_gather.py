"""kv_gather reads each token from where a loop in Python finds its slot, and 0 where there is none."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.harness.searches import searched
from tests.ops.kvcache.paged import paged

from tilewright.errors import InputError
from tilewright.ops import kv_append_, kv_gather
from tilewright.ops.kvcache import layout
from tilewright.validate.bits import same_bits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]
H, D, D_V = 3, 8, 5
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=paged())
@few
def test_each_row_is_the_token_of_its_slot(backend, problem):
    """Unused slots hold NaN and unused entries of the table garbage: neither is read."""
    k_cache, v_cache = problem.cache(H, D), problem.cache(H, D_V, seed=1)
    k, v = torch.zeros(problem.rows, H, D), torch.zeros(problem.rows, H, D_V)
    for row, b, position in problem.tokens():
        k[row], v[row] = k_cache[problem.slot(b, position)], v_cache[problem.slot(b, position)]
    lengths, options = problem.metadata()
    made = kv_gather(k_cache, v_cache, lengths, tokens=problem.rows, **options, backend=backend)
    assert same_bits(made[0], k)
    assert same_bits(made[1], v)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=paged())
@few
def test_it_is_the_inverse_of_the_append(backend, problem):
    k, v = torch.randn(problem.rows, H, D), torch.randn(problem.rows, H, D_V)
    k_cache, v_cache = problem.cache(H, D), problem.cache(H, D_V)
    lengths, options = problem.metadata()
    kv_append_(k_cache, v_cache, k, v, lengths, **options, backend=backend)
    made = kv_gather(k_cache, v_cache, lengths, tokens=problem.rows, **options, backend=backend)
    n = problem.rows - problem.padding
    assert torch.equal(made[0][:n], k[:n])
    assert torch.equal(made[1][:n], v[:n])
    assert not made[0][n:].any()


@given(problem=paged())
@few
def test_the_gather_that_references_of_attention_use(problem):
    cache = problem.cache(H, D)
    lengths, options = problem.metadata()
    table = options.get("block_table")
    dense = layout.read(cache, layout.sequence_slots(cache, lengths, table))
    assert dense.shape[:2] == (len(problem.lengths), problem.size * (1 if table is None else table.shape[1]))
    for b, length in enumerate(problem.lengths):
        for position in range(length):
            assert torch.equal(dense[b, position], cache[problem.slot(b, position)])
        assert not dense[b, length:].any()


def test_a_gradient_is_refused_by_name():
    cache, lengths = torch.zeros(1, 2, 1, 2), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(InputError, match="has no gradient, and v_cache requires one"):
        kv_gather(cache, cache.clone().requires_grad_(), lengths, tokens=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scales_of_an_e4m3_cache(backend):
    cache = torch.tensor([1.0, 2.0, -448.0, 0.5]).view(1, 2, 2, 1).to(torch.float8_e4m3fn)
    lengths = torch.tensor([2], dtype=torch.int32)
    of_heads = torch.tensor([0.5, 3.0])
    made = kv_gather(cache, cache, lengths, tokens=2, k_scale=of_heads, v_scale=2 * of_heads, backend=backend)
    assert [t.dtype for t in made] == [torch.bfloat16] * 2
    assert made[0].flatten().tolist() == [0.5, 6.0, -224.0, 1.5]
    assert made[1].flatten().tolist() == [1.0, 12.0, -448.0, 3.0]
    of_tokens = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    k, _ = kv_gather(cache, cache, lengths, tokens=2, k_scale=of_tokens, v_scale=of_tokens, backend=backend)
    assert k.flatten().tolist() == [1.0, 4.0, -1344.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_beyond_the_result_are_left_out_where_no_check_reads(backend, monkeypatch):
    cache = torch.arange(8.0).view(2, 4, 1, 1)
    lengths, bounds = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
    options = {"cu_seqlens": bounds, "backend": backend}
    with pytest.raises(InputError, match="must not fall, from 0 to at most T = 3"):
        kv_gather(cache, cache, lengths, tokens=3, **options)
    whole, _ = kv_gather(cache, cache, lengths, tokens=6, **options)
    assert whole.flatten().tolist() == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    monkeypatch.setattr("tilewright.ops.kvcache.checks.may_read", lambda t: False)
    for made in kv_gather(cache, cache, lengths, tokens=3, **options):
        assert torch.equal(made, whole[:3])


def test_the_reference_searches_in_no_slice():
    cache, bounds = torch.zeros(2, 4, 1, 1), torch.tensor([0, 2, 6], dtype=torch.int32)
    with searched() as boundaries:
        kv_gather(cache, cache, torch.tensor([3, 4], dtype=torch.int32), tokens=6, cu_seqlens=bounds, backend="torch")
    assert not any(b.storage_offset() for b in boundaries)
