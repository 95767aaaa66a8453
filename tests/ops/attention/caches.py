"""Problems of attention over a KV cache, and their check: the keys of each sequence gathered one by one, then the
formula of `bounds` in float64.
"""

from itertools import pairwise

import torch
from tests.ops.attention.bounds import check

from tilewright import mask as masks
from tilewright.ops.attention.paged.samples import decode_inputs, paged_inputs

SIZES = {"H": 4, "H_kv": 2, "D": 16, "page": 16}
OPTIONS = ("causal", "window", "scale", "softcap", "sinks")


def problem(params, dtype=torch.bfloat16, device="cpu", seed=0):
    """A sample of `fmha_paged` if `new` is among the parameters, else of `fmha_decode`; unused slots are NaN."""
    make = paged_inputs if "new" in params else decode_inputs
    return make({"unused": "nan", **SIZES, **params}, dtype, torch.device(device), seed)


def keys_of(sample, b, cache, scale):
    """(1, H_kv, n, D): keys or values of sequence b, read slot by slot."""
    table, page, n = sample.kwargs.get("block_table"), cache.shape[1], int(sample.args[-1][b])
    slots = [(b, i) if table is None else (int(table[b, i // page]), i % page) for i in range(n)]
    values = [cache[at] if scale is None else cache[at].float() * _scale(scale, at)[:, None] for at in slots]
    if not values:
        return cache.new_zeros(1, cache.shape[2], 0, cache.shape[3])
    return torch.stack(values)[None].transpose(1, 2)


def _scale(scale, at):
    return scale if scale.dim() == 1 else scale[at]


def check_each(made, sample):
    """Every sequence by the formula; tokens behind the last one by what is promised."""
    (q, k_cache, v_cache, *starts, lengths), options = sample.args, sample.kwargs
    o, lse = (t.reshape(-1, *t.shape[q.dim() - 2 :]) for t in made)
    q = q.reshape(-1, *q.shape[-2:])
    each = q.shape[0] // max(len(lengths), 1)
    ends = starts[0].tolist() if starts else [each * b for b in range(len(lengths) + 1)]
    assert o.shape == (*q.shape[:2], v_cache.shape[3])
    assert lse.shape == q.shape[:2]
    scales = [None if options.get(name) is None else options[name] for name in ("k_scale", "v_scale")]
    formula = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    formula.setdefault("causal", True)
    window = formula.pop("window", None)
    if window is not None:
        formula["mask"], formula["causal"] = masks.window(window[0], None), formula["causal"] or window[1] == 0
    for b, (i, j) in enumerate(pairwise(ends)):
        if i == j:
            continue
        k, v = (keys_of(sample, b, cache, s) for cache, s in zip((k_cache, v_cache), scales, strict=True))
        result = o[i:j].transpose(0, 1)[None], lse[i:j].T[None]
        check(result, q[i:j].transpose(0, 1)[None], k.to(q.dtype), v.to(q.dtype), return_lse=True, **formula)
    assert not o[ends[-1] :].any()
    sinks = options.get("sinks")
    nothing = torch.full_like(lse, -torch.inf) if sinks is None else sinks.expand_as(lse)
    torch.testing.assert_close(lse[ends[-1] :], nothing[ends[-1] :])
