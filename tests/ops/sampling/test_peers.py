"""Peers of sampling: what they draw is judged by what the filters keep, and page lists name the pages in use."""

import torch

from tilewright.dispatch import Sample, contract
from tilewright.ops.attention.paged.args import problem_of
from tilewright.ops.attention.peers.flashinfer import pages_of
from tilewright.ops.sampling.peers.sample import FlashInfer

CPU = torch.device("cpu")


def test_draws_are_judged_by_the_filters():
    subject = contract("sample")
    sample = subject.inputs({"M": 16, "N": 500, "top_k": (5, 3), "top_p": (0.9,)}, torch.float32, CPU, 0)
    other = Sample((sample.args[0], sample.args[1] + 1, sample.args[2]), sample.kwargs)
    draws = subject.reference(*other.args, **other.kwargs)
    assert not torch.equal(draws, subject.reference(*sample.args, **sample.kwargs))
    assert FlashInfer().judge(sample, draws.int())
    least = sample.args[0].argmin(-1)
    assert not FlashInfer().judge(sample, torch.cat((draws[:-1], least[-1:])))
    assert not FlashInfer().judge(sample, torch.full_like(draws, 500))
    assert not FlashInfer().judge(sample, draws[:-1])


def test_page_lists_are_those_of_the_table():
    subject = contract("fmha_decode")
    for page in (3, 16, None):
        params = {"H": 4, "H_kv": 2, "D": 8, "lengths": (20, 5, 16), "page": page}
        args = problem_of(subject.inputs(params, torch.bfloat16, CPU, 0))
        rows = pages_of(args)
        assert rows is not None
        size = rows.caches[0].shape[1]
        assert ((rows.starts.diff() - 1) * size + rows.last).tolist() == [20, 5, 16]
        for b in range(3):
            own = rows.pages[rows.starts[b] : rows.starts[b + 1]].tolist()
            keys = rows.caches[0][own].flatten(0, 1)
            if page is None:
                assert torch.equal(keys, args.k_cache[b, : keys.shape[0]])
            else:
                assert own == args.block_table[b, : len(own)].tolist()
    params = {"H": 4, "H_kv": 2, "D": 8, "lengths": (20, 0), "page": 4}
    assert pages_of(problem_of(subject.inputs(params, torch.bfloat16, CPU, 0))) is None  # it has no empty sequence
