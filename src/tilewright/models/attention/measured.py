"""Look attention up in the tuning tables: whether a kernel of ours won the sizes of a model, and of one call."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Plan
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.registry import GENERATION
from tilewright.dispatch.tables import table
from tilewright.hardware import device_info
from tilewright.mask import Mask
from tilewright.ops.attention.arguments import FmhaBackwardArgs, raw_arguments
from tilewright.ops.attention.bucket import BAND, CAUSAL, FULL, PROGRAM, FmhaBucket
from tilewright.ops.attention.fmha import BACKWARD, FORWARD
from tilewright.ops.attention.fmha.torch_first import is_estimated
from tilewright.ops.attention.layout import by_token
from tilewright.ops.attention.score import split

_HEADS = [1 << n for n in range(13)]  # buckets of B * H that are looked up
_LENGTHS = [1 << n for n in range(5, 18)]  # and of S

_verdicts: dict[tuple[Any, ...], bool] = {}


def prefers_ours(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, softcap: float | None, sinks: Tensor | None
) -> bool:
    """True if dispatch picks a kernel of ours for this call of `ops.fmha`, and for its backward if one is needed.

    It picks by a measured row, or by a guess that rests on measured times; a guess that is an estimate does not count,
    and a preference in force (`use_backend`) does.  Planned once for each bucket of sizes.
    """
    raw = raw_arguments(q.detach(), k.detach(), v.detach(), mask, None, split("fmha", None, softcap, sinks))
    preference, numerics = resolve(None)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    bucket = FORWARD.bucket_of(raw, numerics)
    key = (GENERATION[0], bucket, by_token(q), q.dtype, q.device, preference, numerics, grad)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _is_evidence(FORWARD.plan(raw, preference, numerics), bucket, q.dtype)
        if verdict and grad:
            o, lse = FORWARD.allocate(raw, q.device)
            back = FmhaBackwardArgs(
                o, None, raw.q, raw.k, raw.v, o, lse, raw.sinks, raw.slopes, *raw.mask, raw.scale, raw.softcap
            )
            plan = BACKWARD.plan(back, preference, numerics)
            verdict = _is_evidence(plan, BACKWARD.bucket_of(back, numerics), q.dtype)
        _verdicts[key] = verdict
    return verdict


def _is_evidence(plan: Plan, bucket: Any, dtype: torch.dtype) -> bool:
    guessed = plan.row is None and plan.requested == "auto" and plan.numerics == "default"
    return plan.backend != "torch" and not (guessed and is_estimated(bucket, dtype))


def won(config: Any, dtype: torch.dtype, device: torch.device, extras: int) -> int:
    """Number of forward sizes, with the heads that `config` describes, that a kernel of ours won in the tables.

    extras: SOFTCAP | SINKS of `ops/attention/bucket.py`, what the model passes besides its mask.
    """
    shape = heads_of(config)
    if shape is None:
        return 0
    info, name = device_info(device), str(dtype).removeprefix("torch.")
    rows = (table.lookup("fmha", "fwd", text, name, "default", info) for text in _buckets(*shape, extras))
    return sum(int(row.backend != "torch") for row in rows if row is not None)


def heads_of(config: Any) -> tuple[int, int, int] | None:
    """(query heads of a key head, D, D_v) by transformers' names; None where a configuration has none of them."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not heads or not width:
        return None
    nope, rope = getattr(config, "qk_nope_head_dim", None), getattr(config, "qk_rope_head_dim", None)
    if nope is not None and rope is not None:  # latent attention
        return 1, nope + rope, config.v_head_dim
    d = getattr(config, "head_dim", None) or width // heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads), d, d


def _buckets(group: int, d: int, d_v: int, extras: int) -> Iterator[str]:
    for heads, length, mask in itertools.product(_HEADS, _LENGTHS, (FULL, CAUSAL, BAND, PROGRAM)):
        yield FORWARD.bucket_text(FmhaBucket(heads, group, length, length, d, d_v, mask, extras, 1))
