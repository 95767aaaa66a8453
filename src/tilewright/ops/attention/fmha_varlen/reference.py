"""The reference of `fmha_varlen`: one attention per sequence, and the tokens after the last sequence.

It uses no packed masks: every sequence is sliced out and gets a band.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewright.mask import Mask, causal, window
from tilewright.ops.attention import torch_only
from tilewright.ops.attention.arguments import raw_arguments
from tilewright.ops.attention.reference import attention
from tilewright.ops.attention.score import Alibi, RelativeBias, ScoreMod, Scores, Softcap
from tilewright.ops.rows import accumulate_dtype

Operands = tuple[Tensor, Tensor, Tensor]


def by_head(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """Views (1, H, T, D) of tensors (T, H, D)."""
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def band(is_causal: bool, sides: tuple[int | None, int | None] | None) -> Mask | None:
    """The mask inside a sequence; None where everything is allowed."""
    result = None if sides is None else window(*sides)
    if is_causal:
        result = causal() if result is None else result & causal()
    return result


def spans(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence; waits for a GPU."""
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    ends = zip(starts_q[1:], starts_k[1:], strict=True)
    for (q0, k0), (q1, k1) in zip(zip(starts_q, starts_k, strict=True), ends, strict=False):
        yield slice(q0, q1), slice(k0, k1)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, mask: Mask | None, scale: float | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """(o, lse) of q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v), in plain torch."""
    outs, logs, end = [], [], 0
    for queries, keys in spans(cu_q, cu_k):
        if queries.start == queries.stop:
            continue
        operands = by_head(q[queries], k[keys], v[keys])
        if scores.rest:
            steps = tuple(_moved(step, queries.start, keys.start) for step in scores.rest)
            o, lse = torch_only.plain(*operands, mask, scale, scores._replace(rest=steps))
        else:
            o, lse = attention(raw_arguments(*operands, mask, scale, scores))
        outs.append(o[0].transpose(0, 1))
        logs.append(lse[0])
        end = queries.stop
    rest = q.shape[0] - end
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    empty_lse = q.new_full((q.shape[1],), -math.inf, dtype=accumulate_dtype(q.dtype))
    empty_lse = empty_lse if scores.sinks is None else scores.sinks.to(empty_lse.dtype)
    logs.append(empty_lse[:, None].expand(-1, rest))
    return torch.cat(outs), torch.cat(logs, 1)


def _moved(step: Any, first_query: int, first_key: int) -> Any:
    """Shift a callable's indices to those of packed tokens; our own modifiers use only distances."""
    if isinstance(step, (Softcap, Alibi, RelativeBias)):
        return step

    def moved(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        result: Tensor = step(score, b, h, i + first_query, j + first_key)
        return result

    mod: ScoreMod = moved
    return mod
