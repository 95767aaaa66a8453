"""The accuracy gate, which every change has to pass, whatever it gained.

What is compared is errors against a reference, not outputs with each other. The reference, ref, is a copy of the
unpatched model in a wider dtype; e(m) = ||logits(m) - logits(ref)|| / ||logits(ref)|| over the sampled positions. A
changed model passes when all of these hold:

1. every logit is finite, and e(changed) <= max(1.1 e(unpatched), 16 * 2**-24).
   The floor matters for a float32 model: its own error is a few unit roundoffs (2**-24), and any other order of its
   sums moves that by as much.
2. top-1: the share of positions where its first choice is the reference's is not below the Wilson 95 % interval of the
   unpatched model's share.
3. decoding: of the tokens that `generate` chose, the share that the same model's forward over the whole text ranks
   first has not fallen: the 95 % interval of the change of that share reaches 0. Both shares are samples, because the
   two models continue from different tokens.
4. perplexity on held-out prompts has not risen by more than 0.1 %, beyond the 95 % interval of the paired difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.nn.functional as F

from tilewright.assistant.reference import Evaluation, perplexity
from tilewright.models.agreement import Z95, Agreement, relative_error

OWN_ERROR_FACTOR = 1.1
ERROR_FLOOR = 16 * 2.0**-24
PERPLEXITY_RISE = 0.001


@dataclass
class Accuracy:
    """One model next to the unpatched one (`own_*`), both against the wide reference. Shares lie in [0, 1].

    error, own_error, error_limit: relative Frobenius error of the logits. top1_limit: lower end of the Wilson interval.
    decode_change_high: upper end of the 95 % interval of the change in agreement.
    perplexity_rise: relative, with its 95 % interval; None without held-out prompts. failures: one sentence for each
    rule broken.
    """

    positions: int
    error: float
    own_error: float
    error_limit: float
    top1: float
    own_top1: float
    top1_limit: float
    decoded: int = 0
    decode_agreement: float | None = None
    own_decode_agreement: float | None = None
    decode_change_high: float | None = None
    perplexity: float | None = None
    own_perplexity: float | None = None
    perplexity_rise: float | None = None
    perplexity_rise_low: float | None = None
    perplexity_rise_high: float | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return not self.failures


def judge(
    changed: Evaluation, unpatched: Evaluation, reference: Evaluation, perplexity_rise: float | None = None
) -> Accuracy:
    """Apply the four rules to the changed model.

    perplexity_rise: what a change to fewer bits may cost, relative; then perplexity on held-out prompts and finite
    logits are the rules, because no such number format keeps the error of the wide one.
    """
    own_error = relative_error([unpatched.logits], [reference.logits])
    error = relative_error([changed.logits], [reference.logits])
    limit = max(OWN_ERROR_FACTOR * own_error, ERROR_FLOOR)
    top1 = Agreement.of(changed.logits, reference.logits)
    own_top1 = Agreement.of(unpatched.logits, reference.logits)
    accuracy = Accuracy(
        positions=own_top1.total,
        error=error,
        own_error=own_error,
        error_limit=limit,
        top1=top1.rate,
        own_top1=own_top1.rate,
        top1_limit=own_top1.interval[0],
    )
    if perplexity_rise is not None:
        _judge_perplexity(accuracy, changed, unpatched)
        accuracy.error_limit = math.inf
        _judge_few_bits(accuracy, perplexity_rise)
        return accuracy
    if not error <= limit:  # a NaN fails
        accuracy.failures.append(
            f"logit error {error:.2e} exceeds {limit:.2e} (the unpatched model's own: {own_error:.2e})"
        )
    if accuracy.top1 < accuracy.top1_limit:
        accuracy.failures.append(
            f"top-1 agreement {accuracy.top1:.2%} lies below {accuracy.top1_limit:.2%}, the unpatched model's interval"
        )
    _judge_decoding(accuracy, changed, unpatched)
    _judge_perplexity(accuracy, changed, unpatched)
    return accuracy


def _judge_few_bits(accuracy: Accuracy, limit: float) -> None:
    """Let only the rule of perplexity stand, with its own limit."""
    accuracy.failures.clear()
    if not math.isfinite(accuracy.error):
        accuracy.failures.append("a logit is not finite")
    rise = accuracy.perplexity_rise
    if rise is None:
        accuracy.failures.append("there are no held-out prompts to measure perplexity on")
    elif not rise <= limit:  # a NaN fails
        accuracy.failures.append(f"perplexity rose by {rise:.2%}, more than {limit:.1%}")


def meaning(changed: Evaluation, reference: Evaluation) -> tuple[float, float]:
    """Return what rounding does to embeddings, the least cosine of a row (N, V) with the reference's, and to classes,
    the share of rows whose largest entry is where the reference has it.
    """
    ours, exact = changed.logits.double(), reference.logits.double()
    cosine = F.cosine_similarity(ours, exact.to(ours.device), dim=-1)
    return float(cosine.min()), Agreement.of(changed.logits, reference.logits).rate


def _judge_decoding(accuracy: Accuracy, changed: Evaluation, unpatched: Evaluation) -> None:
    if not changed.generated or not unpatched.generated:
        return
    ours, before = Agreement(changed.agreed, changed.generated), Agreement(unpatched.agreed, unpatched.generated)
    accuracy.decoded, accuracy.decode_agreement, accuracy.own_decode_agreement = ours.total, ours.rate, before.rate
    accuracy.decode_change_high = ours.change_from(before)[1]
    if accuracy.decode_change_high < 0:
        accuracy.failures.append(
            f"generate() and forward agree on {ours.rate:.2%} of {ours.total} tokens, the unchanged model's on "
            f"{before.rate:.2%}"
        )


def _judge_perplexity(accuracy: Accuracy, changed: Evaluation, unpatched: Evaluation) -> None:
    if changed.nll is None or unpatched.nll is None:
        return
    difference = changed.nll - unpatched.nll
    mean = float(difference.mean())
    half = Z95 * float(difference.std(correction=0)) / math.sqrt(difference.numel())
    accuracy.perplexity, accuracy.own_perplexity = perplexity(changed.nll), perplexity(unpatched.nll)
    accuracy.perplexity_rise, accuracy.perplexity_rise_low, accuracy.perplexity_rise_high = (
        math.expm1(mean + d) for d in (0.0, -half, half)
    )
    if not accuracy.perplexity_rise_low <= PERPLEXITY_RISE:
        interval = f"95 %: {accuracy.perplexity_rise_low:.2%} to {accuracy.perplexity_rise_high:.2%}"
        accuracy.failures.append(
            f"perplexity rose by {accuracy.perplexity_rise:.2%} ({interval}), more than {PERPLEXITY_RISE:.1%}"
        )
