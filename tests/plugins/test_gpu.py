"""Attention in vLLM's layouts on a GPU, eager and in one CUDA graph for batches of several sizes."""

import pytest
import torch
from tests.plugins.paged import D, attention, batch
from torch.testing import assert_close

from tilewright.plugins.vllm.functions import Step, attend

pytestmark = pytest.mark.gpu
STEPS = {
    "decoding": {"before": [200, 3, 470], "new": [1, 1, 1]},
    "prompts beside decoding": {"before": [20, 0, 150, 0], "new": [1, 180, 1, 40], "padding": 3},
    "drafts": {"before": [5, 310], "new": [3, 3]},
}


def on_gpu(its):
    """Query, key, value, cache and step on the GPU, the cache in its own order of memory."""
    cache = torch.empty_strided(its.cache.shape, its.cache.stride(), dtype=its.cache.dtype, device="cuda")
    step = Step(its.step.tokens, its.step.longest, *(x.cuda() for x in its.step[2:]))
    return its.query.cuda(), its.key.cuda(), its.value.cuda(), cache.copy_(its.cache), step


@pytest.mark.parametrize("options", [{}, {"window": 9}])
@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize(("sizes", "page_size"), [((4, 2, 32), 16), ((32, 8, 128), 64)])
@pytest.mark.parametrize("name", STEPS)
def test_attention_over_pages(name, sizes, page_size, tokens_first, options):
    form = {"sizes": sizes, "page_size": page_size, "tokens_first": tokens_first, "dtype": torch.bfloat16}
    its = batch(**STEPS[name], **form)
    query, key, value, cache, step = on_gpu(its)
    out = torch.full_like(query, 7.0)
    attend(query, key, value, cache, step, out, scale=sizes[2] ** -0.5, **options)
    wanted = attention(its, scale=sizes[2] ** -0.5, **options)
    assert_close(out[: step.tokens].double().cpu(), wanted, atol=1e-2, rtol=1e-2)
    assert (out[step.tokens :] == 7.0).all()


def test_one_graph_of_decoding():
    """Captured for four sequences; then three, whose place in the table is other, and pages of anything behind them."""
    first = batch([50, 3, 17, 90], [1] * 4, dtype=torch.bfloat16)
    query, key, value, cache, step = on_gpu(first)
    out = torch.empty_like(query)
    attend(query, key, value, cache, step, out, scale=D**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(query, key, value, cache, step, out, scale=D**-0.5)
    graph.replay()
    assert_close(out.double().cpu(), attention(first, scale=D**-0.5), atol=1e-2, rtol=1e-2)
    fewer = batch([77, 20, 9], [1] * 3, padding=1, dtype=torch.bfloat16)
    for mine, theirs in zip((query, key, value), fewer[:3], strict=True):
        mine.copy_(theirs)
    cache[: fewer.cache.shape[0]].copy_(fewer.cache)
    step.lengths.zero_()[:3].copy_(fewer.step.lengths)
    step.block_table.fill_(-1)[:3, : fewer.step.block_table.shape[1]].copy_(fewer.step.block_table)
    graph.replay()
    assert_close(out[:3].double().cpu(), attention(fewer, scale=D**-0.5), atol=1e-2, rtol=1e-2)
    assert (out[3:] == 0).all()
