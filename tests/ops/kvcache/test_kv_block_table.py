"""kv_block_table: page lists as FlashInfer keeps them serve the ops that take a block table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import ops
from tilewright.errors import InputError
from tilewright.hardware.graph_capture import captured


def csr(lengths, page_size, device="cpu", *, slack=0):
    """Pages of all sequences, permuted, and poison behind them."""
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 3)[: sum(counts)].int()
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    indices = torch.cat((pages, torch.full((slack,), 1 << 30, dtype=torch.int32)))
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)
    return tuple(t.to(device) for t in (indptr, indices, last))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), st.integers(0, 3), st.integers(0, 2))
def test_every_page_and_length_is_where_it_belongs(lengths, page_size, slack, more):
    indptr, indices, last = csr(lengths, page_size, slack=slack)
    counts = [-(-n // page_size) for n in lengths]
    wide = max(counts, default=0) + more
    table, found = ops.kv_block_table(indptr, indices, last, page_size=page_size, max_pages=wide)
    assert table.shape == (len(lengths), wide)
    assert found.tolist() == lengths
    for b, count in enumerate(counts):
        assert table[b, :count].tolist() == indices[indptr[b] : indptr[b + 1]].tolist()
        assert not table[b, count:].any()


def test_decoding_over_it_is_decoding_over_gathered_keys():
    lengths, page_size = [9, 1, 16], 4
    indptr, indices, last = csr(lengths, page_size)
    pages = int(indices.max()) + 1
    k, v = torch.randn(2, pages, page_size, 2, 16)
    q = torch.randn(3, 4, 16)
    table, n = ops.kv_block_table(indptr, indices, last, page_size=page_size, max_pages=4)
    o = ops.fmha_decode(q, k, v, n, block_table=table)
    for b, length in enumerate(lengths):
        own = indices[indptr[b] : indptr[b + 1]].long()
        keys, values = (x[own].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(q[b][:, None], keys, values)[:, 0]
        torch.testing.assert_close(o[b], expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a[0].__setitem__(0, 1), "must not fall, from 0"),
        (lambda a: a[0].__setitem__(-1, 99), "at most N"),
        (lambda a: a[2].__setitem__(0, 5), "last_page_len is 5; needs 1 to page_size, 4"),
        (lambda a: a[2].__setitem__(0, 0), "last_page_len is 0"),
    ],
)
def test_numbers_that_break_the_rules_are_refused_on_a_cpu(change, match):
    args = csr([5, 9], 4)
    change(args)
    with pytest.raises(InputError, match=match):
        ops.kv_block_table(*args, page_size=4, max_pages=3)


def test_too_few_columns_are_refused_on_a_cpu():
    with pytest.raises(InputError, match="a sequence has 3 pages; max_pages is 2"):
        ops.kv_block_table(*csr([5, 9], 4), page_size=4, max_pages=2)


@pytest.mark.gpu
def test_one_graph_serves_other_lists():
    """With the attention behind it."""
    first, second = csr([40, 7, 0], 16, "cuda", slack=9), csr([3, 50, 33], 16, "cuda", slack=9)
    indptr, indices, last = first[0].clone(), torch.zeros(32, dtype=torch.int32, device="cuda"), first[2].clone()
    k, v = torch.randn(2, 16, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        table, n = ops.kv_block_table(indptr, indices, last, page_size=16, max_pages=4)
        return ops.fmha_decode(q, k, v, n, block_table=table)

    indices[: first[1].shape[0]] = first[1].clamp(max=15)
    step()
    graph = torch.cuda.CUDAGraph()
    with captured(graph, q.device):
        o = step()
    for given_lists in (first, second):
        indptr.copy_(given_lists[0])
        indices[: given_lists[1].shape[0]] = given_lists[1].clamp(max=15)
        last.copy_(given_lists[2])
        graph.replay()
        assert torch.equal(o, step())
