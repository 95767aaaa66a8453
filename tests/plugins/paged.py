"""A step of vLLM's: new tokens of several sequences over its paged cache, and attention over it in float64.

Layouts are those of vLLM 0.33: a cache (pages, heads, page_size, 2 D) with keys before values, tokens of all sequences
end to end, padding behind them, a block table whose unused entries are anything.
"""

from typing import NamedTuple

import torch

from tilewright.plugins.vllm.functions import Step

PAGE, HEADS, KV_HEADS, D = 16, 4, 2, 32


class Batch(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    step: Step
    keys: list  # of each sequence: (length, H_kv, D), old and new
    values: list


def batch(
    before, new, *, padding=0, tokens_first=True, dtype=torch.float32, sizes=(HEADS, KV_HEADS, D), page_size=PAGE
):
    """before, new: tokens of each sequence in the cache, and in this step.   tokens_first: vLLM's layout LBNHC."""
    heads, kv_heads, d = sizes
    rng = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=rng).to(dtype)

    tokens, lengths = sum(new), [a + b for a, b in zip(before, new, strict=True)]
    width = -(-max(lengths) // page_size) + 1
    pages = len(new) * width + 1
    table = torch.randperm(pages - 1, generator=rng)[: len(new) * width].reshape(len(new), width).int() + 1
    shape = (pages, page_size, kv_heads, 2 * d) if tokens_first else (pages, kv_heads, page_size, 2 * d)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    cache = cache.transpose(1, 2) if tokens_first else cache
    query, key, value = draw(tokens + padding, heads, d), *(draw(tokens + padding, kv_heads, d) for _ in range(2))
    keys, values, start = [], [], 0
    for b, (old, count) in enumerate(zip(before, new, strict=True)):
        keys.append(torch.cat([draw(old, kv_heads, d), key[start : start + count]]))
        values.append(torch.cat([draw(old, kv_heads, d), value[start : start + count]]))
        for place in range(old):
            page, row = table[b, place // page_size], place % page_size
            cache[page, :, row] = torch.cat([keys[b][place], values[b][place]], dim=-1)
        start += count
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    step = Step(tokens, max(new), starts, torch.tensor(lengths, dtype=torch.int32), table)
    return Batch(query, key, value, cache, step, keys, values)


def attention(its, *, scale, window=None, softcap=None, sinks=None):
    """(tokens, H, D) in float64."""
    rows, start, heads = [], 0, its.query.shape[1]
    for keys, values, end in zip(its.keys, its.values, its.step.starts[1:].tolist(), strict=True):
        k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
        for row in range(start, end):
            position = len(k) - end + row
            first = 0 if window is None else max(position - window + 1, 0)
            scores = scale * torch.einsum("hd,nhd->hn", its.query[row].double(), k[first : position + 1])
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            extra = torch.zeros(heads, 0) if sinks is None else sinks[:, None]
            p = torch.cat([scores, extra.double()], dim=1).softmax(-1)[:, : scores.shape[1]]
            rows.append(torch.einsum("hn,nhd->hd", p, v[first : position + 1]))
        start = end
    return torch.stack(rows)
