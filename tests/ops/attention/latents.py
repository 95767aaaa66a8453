"""Problems of `mla_decode`, and their check: the tokens that each query sees collected one by one, then the formula of
`bounds` in float64.
"""

import torch
from tests.ops.attention.bounds import check

from tilewright.ops.attention.mla_decode.samples import inputs
from tilewright.ops.kvcache.mla_layout import dequantize_mla_cache

SIZES = {"H": 4, "D": 48, "d_v": 32, "page": 16}
MODEL = {"D": 576, "d_v": 512}


def problem(params, dtype=torch.bfloat16, device="cpu", seed=0):
    """A sample; unused slots are NaN."""
    return inputs({"unused": "nan", **SIZES, **params}, dtype, torch.device(device), seed)


def tokens_of(sample, slots):
    """(n, D): these slots of the cache, in q's dtype."""
    q, cache = sample.args[:2]
    rows = cache.reshape(-1, cache.shape[-1])[torch.tensor(slots, dtype=torch.int64, device=cache.device)]
    return rows if cache.dtype == q.dtype else dequantize_mla_cache(rows, q.dtype)


def slots_of(sample, b):
    """The slots of sequence b in the order of its tokens."""
    cache, lengths = sample.args[1:3]
    page, n = cache.shape[1], int(lengths[b])
    table = sample.kwargs.get("block_table")
    return [b * page + i if table is None else int(table[b, i // page]) * page + i % page for i in range(n)]


def chosen_slots(sample, b, token):
    """The slots that the indices of one token name."""
    cache, lengths = sample.args[1:3]
    indices = sample.kwargs["indices"][b, token].tolist()
    count = len(indices) if lengths is None else int(lengths[b])
    return [i for i in indices[: max(count, 0)] if 0 <= i < cache.shape[0] * cache.shape[1]]


def check_each(made, sample):
    """Every sequence by the formula, with indices every token."""
    q, options = sample.args[0], sample.kwargs
    q = q.unsqueeze(1) if q.dim() == 3 else q
    o, lse = (t.view(*q.shape[:3], *t.shape[sample.args[0].dim() - 1 :]) for t in made)
    d_v, is_sparse = options["d_v"], "indices" in options
    assert o.shape == (*q.shape[:3], d_v)
    assert lse.shape == q.shape[:3]
    formula = {name: options[name] for name in ("scale", "sinks") if options.get(name) is not None}
    causal = options.get("causal", True) and not is_sparse
    for b in range(q.shape[0]):
        for i, j in [(t, t + 1) for t in range(q.shape[1])] if is_sparse else [(0, q.shape[1])]:
            k = tokens_of(sample, chosen_slots(sample, b, i) if is_sparse else slots_of(sample, b))[None, None]
            result = o[b, i:j].transpose(0, 1)[None], lse[b, i:j].T[None]
            rows = q[b, i:j].transpose(0, 1)[None]
            check(result, rows, k, k[..., :d_v], return_lse=True, causal=causal, **formula)
