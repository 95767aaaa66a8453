"""Documents by the id of every key on a GPU: the intervals of `cu_seqlens`, found without waiting, anew in each
replay of a graph.
"""

from itertools import pairwise

import pytest
import torch

from tilewright import mask, ops
from tilewright.dispatch import record

pytestmark = pytest.mark.gpu
ENDS = {"many": [0, 1, 130, 131, 700, 999, 1024], "one": [0, 1024], "rows": [0, 512, 1024]}
BANDS = {"alone": mask.window(None, None), "causal": mask.causal(), "window": mask.window(100, 7)}


def operands(batch, s=1024, d=128, s_q=None):
    g = torch.Generator("cuda").manual_seed(0)
    sizes = (8, s_q or s), (2, s), (2, s)
    made = (torch.randn(batch, h, n, d, generator=g, device="cuda").bfloat16() for h, n in sizes)
    q, k, v = (t.requires_grad_() for t in made)
    return q, k, v


def numbered(ends):
    """(S,) int32: documents that end there, with ids that jump."""
    return torch.cat([torch.full((b - a,), 7 * n - 3) for n, (a, b) in enumerate(pairwise(ends))]).int()


def results(q, k, v, **options):
    """o and the gradients."""
    o = ops.fmha(q, k, v, **options)
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(o)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def near(found, expected, most=0.0):
    """Whether no error is larger than `most` of the largest number."""
    pairs = zip(found, expected, strict=True)
    return all((a.float() - b.float()).abs().max() <= most * b.float().abs().max() for a, b in pairs)


@pytest.mark.parametrize("s_q", [1024, 300])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("name", ENDS)
def test_they_are_the_bits_of_cu_seqlens(name, band, d, s_q):
    q, k, v = operands(2, d=d, s_q=s_q)
    cu = torch.tensor(ENDS[name], dtype=torch.int32, device="cuda")
    ids = numbered(ENDS[name]).cuda()
    expected = results(q, k, v, mask=mask.document(cu_seqlens=cu, length=1024) & BANDS[band])
    assert near(results(q, k, v, mask=mask.document(ids, contiguous=True) & BANDS[band]), expected)
    # Other rows of the batch take kernels of their own
    rows = torch.stack([ids, ids + 5])
    assert near(results(q, k, v, mask=mask.document(rows, contiguous=True) & BANDS[band]), expected)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("band", BANDS)
def test_each_row_of_a_batch_is_what_it_is_alone(band, d, backend):
    """The forward bit for bit on Hopper; in how many parts a gradient is added up depends on the batch."""
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    ids = torch.stack([numbered(ends) for ends in ENDS.values()]).cuda()
    q, k, v = operands(len(ids), d=d)
    found = results(q, k, v, mask=mask.document(ids, contiguous=True) & BANDS[band], backend=backend)
    for row, row_ids in enumerate(ids):
        alone = [t[row : row + 1].detach().requires_grad_() for t in (q, k, v)]
        o = ops.fmha(*alone, mask=mask.document(row_ids, contiguous=True) & BANDS[band], backend=backend)
        do = torch.randn(found[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(o)
        gradients = torch.autograd.grad(o, alone, do[row : row + 1])
        of_row, *gradients_of_row = (t[row : row + 1] for t in found)
        assert near([of_row], [o], 0.0 if backend == "cuda" else 0.02)
        assert near(gradients_of_row, gradients, 0.02)
    dense = mask.document(ids) & BANDS[band]  # by comparisons
    assert near(found, results(q, k, v, mask=dense, backend="triton"), 0.05)


def test_ids_that_come_again_are_compared_unless_runs_are_meant():
    q, k, v = operands(1)
    ids = torch.tensor([0, 1, 0, 1], device="cuda").repeat_interleave(256)
    with record() as notes:
        o = ops.fmha(q, k, v, mask=mask.document(ids))
    assert notes.calls[0][1][6] == "doc:0"
    again = ops.fmha(q, k, v, mask=mask.document(ids.cpu()))
    assert torch.equal(o, again)
    runs = torch.arange(1024, device="cuda") // 256
    expected = ops.fmha(q, k, v, mask=mask.document(runs, contiguous=True))
    assert torch.equal(ops.fmha(q, k, v, mask=mask.document(ids, contiguous=True)), expected)
    assert not torch.equal(o, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing_and_a_graph_reads_the_ids_of_its_replay():
    q, k, v = operands(2)
    ids = torch.stack([numbered(ENDS["many"]), numbered(ENDS["rows"])]).cuda()

    def call():
        return results(q, k, v, mask=mask.document(ids, contiguous=True) & mask.causal())

    call()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        # Detached, because a graph of autograd would bind the leaves to the capture's stream
        captured = ops.fmha(q, k, v, mask=mask.document(ids, contiguous=True) & mask.causal()).detach()
    ids.copy_(torch.stack([numbered(ENDS["one"]), numbered(ENDS["many"])]))
    graph.replay()
    assert torch.equal(captured, call()[0])
