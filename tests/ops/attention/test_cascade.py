"""A prefix that all sequences share, attended to once for all of them, then joined with each one's own keys."""

import pytest
import torch

from tilewright.hardware.graph_capture import captured
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.attention.merge_states import merge_states

PAGE, HEADS, KV_HEADS, D = 4, 4, 2, 16


def cascade(q, k, v, prefix, lengths, tables, sinks):
    """o and lse of `fmha_decode` where every table begins with the pages of `prefix`, and `tables` has the rest.

    The prefix is whole pages, and every new token sees all of it: the tokens of all sequences are those of one.
    """
    tokens = q.flatten(0, 1)
    starts = torch.arange(2, dtype=torch.int32, device=q.device) * tokens.shape[0]  # also inside of a capture
    shared_length = torch.full((1,), prefix.numel() * PAGE, dtype=torch.int32, device=q.device)
    shared = fmha_paged(
        tokens, k, v, starts, shared_length, block_table=prefix[None], causal=False, sinks=sinks, return_lse=True
    )
    own = fmha_decode(q, k, v, lengths, block_table=tables, return_lse=True)  # the sink is in one of the two
    o, lse = shared[0].view_as(own[0]), shared[1].view_as(own[1])
    return merge_states((o, own[0]), (lse, own[1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_is_decoding_over_all_keys(device, s_q, has_sinks):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(40, PAGE, KV_HEADS, D, generator=generator).to(device, dtype) for _ in range(2))
    own_lengths = torch.tensor([9, s_q, 16, 4], dtype=torch.int32)
    batch = own_lengths.numel()
    q = torch.randn(batch, s_q, HEADS, D, generator=generator).to(device, dtype)
    sinks = torch.randn(HEADS, generator=generator).to(device) if has_sinks else None
    pages = torch.randperm(40, generator=generator).int()
    prefix, tables = pages[:5].to(device), pages[5 : 5 + 4 * batch].view(batch, 4).to(device)
    lengths = own_lengths.to(device)

    o, lse = cascade(q, k, v, prefix, lengths, tables, sinks)

    whole = torch.cat((prefix.expand(batch, -1), tables), 1)
    expected, expected_lse = fmha_decode(
        q, k, v, lengths + prefix.numel() * PAGE, block_table=whole, sinks=sinks, return_lse=True
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(o, expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_one_graph_serves_other_lengths_and_pages():
    """Both calls and the merge in one graph: the prefix changes too, in its pages."""
    k, v = (torch.randn(40, PAGE, KV_HEADS, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(4, 1, HEADS, D, device="cuda", dtype=torch.bfloat16)
    lengths, pages = torch.tensor([9, 1, 16, 4], dtype=torch.int32).cuda(), torch.randperm(40).int().cuda()
    prefix, tables = pages[:5], pages[5:21].view(4, 4)
    cascade(q, k, v, prefix, lengths, tables, None)
    graph = torch.cuda.CUDAGraph()
    with captured(graph, q.device):
        o, lse = cascade(q, k, v, prefix, lengths, tables, None)
    for changed in ([1, 2, 3, 16], [16, 16, 1, 7]):
        lengths.copy_(torch.tensor(changed))
        pages.copy_(torch.randperm(40))
        q.normal_()
        graph.replay()
        expected, expected_lse = fmha_decode(
            q, k, v, lengths + 5 * PAGE, block_table=torch.cat((prefix.expand(4, -1), tables), 1), return_lse=True
        )
        torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
