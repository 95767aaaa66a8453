"""Few queries behind many keys: `fmha` and `fmha_varlen` go to the kernels of attention over a KV cache."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import record

KEYS = (300, 0, 5, 600, 64, 1, 77)  # 1024 are rounded up to
QUERIES = (1, 1, 1, 1, 0, 1, 2)


def boundaries(lengths, device="cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed(heads=4, kv_heads=2, d=16, by_head=False) -> tuple[Tensor, ...]:
    """q, k, v and both boundaries, with tokens behind the last sequence."""
    generator = torch.Generator().manual_seed(3)

    def made(tokens, count):
        shape = (count, tokens, d) if by_head else (tokens, count, d)
        t = torch.randn(shape, generator=generator)
        return t.transpose(0, 1) if by_head else t

    q, k, v = made(sum(QUERIES) + 1, heads), made(sum(KEYS) + 3, kv_heads), made(sum(KEYS) + 3, kv_heads)
    return q, k, v, boundaries(QUERIES), boundaries(KEYS)


def dense(batch=2, heads=4, kv_heads=2, s_q=3, s_k=600, d=16, by_token=False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def made(rows, count):
        shape = (batch, rows, count, d) if by_token else (batch, count, rows, d)
        t = torch.randn(shape, generator=generator)
        return t.transpose(1, 2) if by_token else t

    return made(s_q, heads), made(s_k, kv_heads), made(s_k, kv_heads)


def exact(op, tensors, **options):
    """(o, lse) in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    options = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
    return op(*wide, return_lse=True, backend="torch", **options)


def check(op, tensors, kernel, **options):
    with record() as recording:
        o, lse = op(*tensors, return_lse=True, backend=kernel.partition(".")[0], **options)
    assert [plan.kernel for plan in recording.plans] == [kernel]
    expected_o, expected_lse = exact(op, tensors, **options)
    torch.testing.assert_close(o.double(), expected_o, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-5)
    with record():  # a second call
        assert torch.equal(op(*tensors, backend=kernel.partition(".")[0], **options), o)


@pytest.mark.interp
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (20, 0), "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])},
        {"window": (3, 2), "softcap": 3.0, "scale": 0.3},
    ],
    ids=["full", "window", "both_sides"],
)
@pytest.mark.parametrize("by_head", [False, True])
def test_packed_queries_read_their_keys_where_they_lie(by_head, options):
    check(ops.fmha_varlen, packed(by_head=by_head), "triton.few_queries", **options)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"causal": True, "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])}),
        ({"by_token": True}, {"mask": masks.window(40), "softcap": 2.0}),
        ({"batch": 1, "s_q": 2}, {}),
        ({"s_q": 1, "heads": 2}, {"causal": True}),
    ],
    ids=["by_head", "by_token", "one_sequence", "one_query"],
)
def test_keys_of_few_queries_are_a_cache(sizes, options):
    check(ops.fmha, dense(**sizes), "triton.few_queries", **options)
