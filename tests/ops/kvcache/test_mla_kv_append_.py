"""mla_kv_append_ writes each new latent where a loop in Python finds its slot, and no other byte.

The torch backend runs in the default process, Triton in its interpreter; both against that loop, bit for bit.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.kvcache.paged import paged

from tilewright.dispatch import contract
from tilewright.errors import InputError, RefusedError
from tilewright.ops import mla_decode, mla_kv_append_
from tilewright.ops.kvcache.mla_layout import TOKEN_BYTES, quantize_mla_cache
from tilewright.validate.bits import same_bits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]
D, D_PE = 10, 6
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def latents(problem, d, d_pe, dtype=torch.float32, size=1.0):
    """Two views of one projection."""
    joined = size * torch.randn(problem.rows, d + d_pe, generator=torch.Generator().manual_seed(2))
    joined = joined.to(dtype)
    return joined, joined[:, :d], joined[:, d:]


def appended(problem, cache, tokens):
    """By a loop: what the cache holds afterwards."""
    wanted = cache.clone()
    for row, b, position in problem.tokens():
        wanted[problem.slot(b, position)] = tokens[row]
    return wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(problem=paged())
@few
def test_each_token_is_written_to_its_slot_and_nothing_else(backend, dtype, problem):
    cache = problem.cache(1, D + D_PE, dtype).squeeze(2)
    joined, c_kv, k_pe = latents(problem, D, D_PE, dtype)
    wanted = appended(problem, cache, joined)
    lengths, options = problem.metadata()
    assert mla_kv_append_(cache, c_kv, k_pe, lengths, **options, backend=backend) is None
    assert same_bits(cache, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    problem=paged(), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), octave=st.integers(-9, 9)
)
@few
def test_656_bytes(backend, problem, dtype, octave):
    cache = torch.randint(256, (problem.pages, problem.size, TOKEN_BYTES), dtype=torch.uint8)
    joined, c_kv, k_pe = latents(problem, 512, 64, dtype, 2.0**octave)
    wanted = appended(problem, cache, quantize_mla_cache(joined))
    lengths, options = problem.metadata()
    mla_kv_append_(cache, c_kv, k_pe, lengths, **options, backend=backend)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forms_of_a_cache(backend):
    """A dimension for one head, float8 for bytes, columns of a wider tensor."""
    joined = torch.randn(2, 576)
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    plain, packed = torch.zeros(2, 3, 576), torch.zeros(2, 3, TOKEN_BYTES, dtype=torch.uint8)
    wide = torch.zeros(2, 3, 700)
    for cache in (plain[:, :, None], packed[:, :, None].view(torch.float8_e4m3fn), wide[:, :, 64:640]):
        mla_kv_append_(cache, joined[:, :512], joined[:, 512:], lengths, backend=backend)
    for b in range(2):
        assert torch.equal(plain[b, b], joined[b])
        assert torch.equal(wide[b, b, 64:640], joined[b])
        assert torch.equal(packed[b, b], quantize_mla_cache(joined[b]))
    assert int(plain.count_nonzero()) == int(wide.count_nonzero()) == joined.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_appended_is_what_mla_decode_reads(backend):
    """A new token attends to itself alone, as the first of its sequence."""
    joined, q = torch.randn(2, 576), torch.randn(2, 3, 576)
    cache = torch.full((2, 3, 576), torch.nan)
    lengths = torch.ones(2, dtype=torch.int32)
    mla_kv_append_(cache, joined[:, :512], joined[:, 512:], lengths, backend=backend)
    o = mla_decode(q, cache, lengths, backend="torch")
    torch.testing.assert_close(o, joined[:, None, :512].expand(2, 3, 512))


@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_in_the_table_and_lengths_beyond_it_write_nothing_elsewhere(backend, monkeypatch):
    """What the checks refuse on a CPU is the contract of a GPU, where no check reads them: such a token is dropped."""
    monkeypatch.setattr("tilewright.ops.kvcache.checks.may_read", lambda t: False)
    cache, x = torch.zeros(2, 4, 2), torch.ones(6, 1)
    table = torch.tensor([[1, 2147480000], [-5, 0], [0, 1]], dtype=torch.int32)
    lengths = torch.tensor([6, 1, 99], dtype=torch.int32)
    mla_kv_append_(cache, x, x, lengths, block_table=table, backend=backend)
    assert not cache.any()


def test_numbers_outside_of_the_cache_are_refused_on_a_cpu():
    cache, x = torch.zeros(3, 4, 2), torch.ones(4, 1)
    lengths, table = torch.tensor([5, 2]).int(), torch.tensor([[0, 7], [2, 2]]).int()
    with pytest.raises(InputError, match="pages in use reach from 0 to 7"):
        mla_kv_append_(cache, x, x, lengths, block_table=table)
    assert not cache.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_tokens_at_odd_bytes_are_torchs(backend):
    cache = torch.zeros(2, 3, 659, dtype=torch.uint8)[:, :, 3:]
    joined, lengths = torch.randn(2, 576), torch.tensor([1, 2], dtype=torch.int32)
    arguments = (cache, joined[:, :512], joined[:, 512:], lengths)
    if backend == "triton":
        with pytest.raises(RefusedError, match="at multiples of 16 bytes"):
            mla_kv_append_(*arguments, backend=backend)
    else:
        mla_kv_append_(*arguments)
        assert torch.equal(cache[1, 1], quantize_mla_cache(joined[1]))


def test_a_gradient_is_refused_by_name():
    x = torch.ones(2, 1, requires_grad=True)
    with pytest.raises(InputError, match="has no gradient, and c_kv requires one"):
        mla_kv_append_(torch.zeros(2, 3, 2), x, x.detach(), torch.ones(2, dtype=torch.int32))


def test_under_compile_the_graph_breaks_nowhere_and_the_cache_is_written():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(cache, c_kv, k_pe, lengths):
        mla_kv_append_(cache[:, :, None], c_kv + 1, k_pe, lengths)
        return cache.sum()  # reads what was written

    cache, x = torch.zeros(2, 3, 4), torch.ones(2, 2)
    total = step(cache, x, x, torch.tensor([1, 2], dtype=torch.int32))
    assert total == cache.sum() == 2 * 2 * (2 + 1)
    assert torch.equal(cache[1, 1], torch.tensor([2.0, 2.0, 1.0, 1.0]))


def test_what_is_written_is_named_in_the_schema():
    arguments = torch.ops.tilewright.mla_kv_append_.default._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None]
    assert written == ["kv_cache"] == list(contract("mla_kv_append_").forward.mutates)


def test_cost():
    subject = contract("mla_kv_append_")
    sizes = {"D": 512, "D_pe": 64, "page_size": 4, "lengths": [5, 6], "new": 2}
    for cache, token in ((None, 2 * 576), ("e4m3", TOKEN_BYTES)):
        sample = subject.inputs({**sizes, "cache": cache}, torch.bfloat16, torch.device("cpu"), 0)
        cost = subject.cost(sample, "fwd")
        assert cost.bytes_written == 4 * token
        assert cost.bytes_read >= 4 * 2 * 576
