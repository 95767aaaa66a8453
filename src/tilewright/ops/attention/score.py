"""Score modifiers: changes to s = scale * q k^T before the softmax.

    softcap(limit)         s = limit * tanh(s / limit)                               native
    alibi(slopes)          s = s - slopes[h] * |position - key|                      native, alone or after softcap
    sinks(values)          exp(values[h]) joins the denominator                      native
    relative_bias(table)   s = s + table[h, clamp(position - key, -R, R) + R]        FlexAttention
    any callable           s = f(s, b, h, q_idx, kv_idx), torch's signature          FlexAttention

`fmha(score_mod=...)` takes one of these or a tuple of them, applied in order.  Native ones are inside the kernels;
if one modifier of a call is not, or softcap comes after alibi, all of them go to FlexAttention, on the torch backend.

The position of query i is i + S_k - S_q; a plain callable gets i itself as q_idx, as torch's does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, q_idx, kv_idx) -> score, all scalars, as torch's FlexAttention calls it."""


@dataclass(frozen=True, eq=False)
class Softcap:
    """limit * tanh(s / limit): no score leaves (-limit, limit).  Gemma 2."""

    limit: float

    def mod(self, offset: int) -> ScoreMod:
        """FlexAttention's score_mod; `offset` is S_k - S_q."""
        limit = self.limit
        return lambda s, b, h, i, j: limit * torch.tanh(s / limit)


@dataclass(frozen=True, eq=False)
class Alibi:
    """A penalty that grows with the distance.  slopes: (H,)."""

    slopes: Tensor

    def mod(self, offset: int) -> ScoreMod:
        """FlexAttention's score_mod; `offset` is S_k - S_q."""
        slopes = self.slopes
        return lambda s, b, h, i, j: s - slopes[h] * (i + offset - j).abs()


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A learned number for each head and distance.  table: (H, 2 R + 1)."""

    table: Tensor

    def mod(self, offset: int) -> ScoreMod:
        """FlexAttention's score_mod; `offset` is S_k - S_q."""
        table = self.table
        reach = table.shape[1] // 2
        return lambda s, b, h, i, j: s + table[h, (i + offset - j).clamp(-reach, reach) + reach]


@dataclass(frozen=True, eq=False)
class Sinks:
    """A key of score values[h] and value zero for every query of head h.  values: (H,).  GPT-OSS."""

    values: Tensor


def softcap(limit: float) -> Softcap:
    """s = limit * tanh(s / limit).  Raises InputError unless limit is positive and finite.

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.
    """
    if not (isinstance(limit, Real) and 0 < limit < math.inf):
        raise InputError(f"softcap: the limit is {limit!r}; needs a positive finite number.")
    return Softcap(float(limit))


def alibi(slopes: Tensor) -> Alibi:
    """s = s - slopes[h] * |position - key|.   slopes: (H,) floating point; no gradient.  See `alibi_slopes`.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", 2022.
    """
    return Alibi(_of_heads("alibi", "slopes", slopes, 1))


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """(heads,) float32: 2^(-8 h / heads) for h = 1 .. heads, of a power of two heads; for another number those of the
    power below, then every second one of the power above, as in the paper.
    """
    below = 1 << (heads.bit_length() - 1)
    powers = [8 * (h + 1) / below for h in range(below)]
    powers += [4 * (2 * h + 1) / below for h in range(heads - below)]
    return torch.tensor([2.0**-power for power in powers], dtype=torch.float32, device=device)


def sinks(values: Tensor) -> Sinks:
    """exp(values[h]) joins the denominator of the softmax; the same as `fmha(sinks=...)`.   values: (H,)

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024; learned, as in GPT-OSS.
    """
    return Sinks(_of_heads("sinks", "values", values, 1))


def relative_bias(table: Tensor) -> RelativeBias:
    """s = s + table[h, clamp(position - key, -R, R) + R].   table: (H, 2 R + 1) floating point, with a gradient.

    T5's buckets are such a table: bucket(distance) is constant beyond its largest distance, R.
    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020.
    """
    checked = _of_heads("relative_bias", "table", table, 2)
    if checked.shape[1] % 2 == 0:
        raise InputError(f"relative_bias: table is {tuple(table.shape)}; needs (H, 2 R + 1), a column a distance.")
    return RelativeBias(checked)


class Scores(NamedTuple):
    """The score modifiers of a call.  If no kernel has them all, `rest` holds every one but the sinks."""

    softcap: float
    slopes: Tensor | None
    sinks: Tensor | None
    rest: tuple[Any, ...]


def split(op: str, score_mod: Any, softcap_limit: float | None, sink_values: Tensor | None) -> Scores:
    """Sort the modifiers of a call.  Raises InputError for something else, or for sinks given twice."""
    if score_mod is None and sink_values is None:
        return Scores(_limit(softcap_limit), None, None, ())
    modifiers = list(score_mod) if isinstance(score_mod, Sequence) else [] if score_mod is None else [score_mod]
    for each in modifiers:
        if not isinstance(each, (Softcap, Alibi, RelativeBias, Sinks)) and not callable(each):
            raise InputError(
                f"{op}: a score_mod is a {type(each).__name__}; needs one of tilewright.ops.attention.score, or a "
                "callable (score, b, h, q_idx, kv_idx) -> score."
            )
    all_sinks = [each.values for each in modifiers if isinstance(each, Sinks)]
    if sink_values is not None:
        all_sinks.append(sink_values)
    if len(all_sinks) > 1:
        raise InputError(f"{op}: sinks are given {len(all_sinks)} times; a softmax has one denominator.")
    steps = [each for each in modifiers if not isinstance(each, Sinks)]
    if softcap_limit is not None:
        steps.insert(0, softcap(softcap_limit))
    sink = all_sinks[0] if all_sinks else None
    kinds = [type(each) for each in steps]
    if kinds in ([], [Softcap], [Alibi], [Softcap, Alibi]):
        limit = steps[0].limit if kinds[:1] == [Softcap] else 0.0
        slopes = steps[-1].slopes if kinds[-1:] == [Alibi] else None
        return Scores(limit, slopes, sink, ())
    return Scores(0.0, None, sink, tuple(steps))


def combined(steps: Sequence[Any], offset: int) -> ScoreMod:
    """One callable that applies `steps` in order; `offset` is S_k - S_q."""
    mods = [step.mod(offset) if isinstance(step, (Softcap, Alibi, RelativeBias)) else step for step in steps]

    def apply(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for mod in mods:
            score = mod(score, b, h, i, j)
        return score

    return apply


def _limit(limit: float | None) -> float:
    """The limit, 0.0 for none."""
    return 0.0 if limit is None else softcap(limit).limit


def _of_heads(op: str, name: str, t: Any, dims: int) -> Tensor:
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() != dims:
        got = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        needs = "(H,)" if dims == 1 else "(H, 2 R + 1)"
        raise InputError(f"{op}: {name} is {got}; needs {needs} of floating-point numbers.")
    return t
