"""Losses of preferences and of rewards on log-probabilities, in plain torch, which a linear layer gives without logits.

    log_probs = linear_log_probs(hidden, weight, target)              # (B, S), by chunks of rows
    loss = dpo_loss(*(sequence_log_probs(t) for t in (chosen, rejected, reference_chosen, reference_rejected)))

What is large is in `linear_log_probs`; all else has a number for each token or sequence.  Everything is differentiable;
log-probabilities of a reference model have no gradient if they were computed without one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """log softmax(hidden @ weight^T + bias)[target] of each token, (...) float32; 0 where target is ignore_index.

    Arguments as in `linear_cross_entropy`, which it is, negated, with a loss for each row.
    """
    return -linear_cross_entropy(
        hidden, weight, target, bias, ignore_index=ignore_index, softcap=softcap, reduction="none",
        chunk_rows=chunk_rows, backend=backend,
    )  # fmt: skip


def sequence_log_probs(log_probs: Tensor, mask: Tensor | None = None, *, average: bool = False) -> Tensor:
    """Sum over tokens of each sequence, or their mean (ORPO, SimPO): (B, S) to (B,).   mask: (B, S), 0 for padding."""
    if log_probs.dim() != 2 or (mask is not None and mask.shape != log_probs.shape):
        shapes = tuple(log_probs.shape), None if mask is None else tuple(mask.shape)
        raise InputError(f"sequence_log_probs: log_probs is {shapes[0]}, mask {shapes[1]}; needs (B, S) of both.")
    counted = torch.ones_like(log_probs) if mask is None else mask.to(log_probs.dtype)
    total = (log_probs * counted).sum(1)
    return total / counted.sum(1) if average else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean of -log sigmoid(beta * ((chosen - reference_chosen) - (rejected - reference_rejected))).

    All (B,), sums of `sequence_log_probs`.   label_smoothing: the chance that a label is wrong (conservative DPO).
    Source: Rafailov et al., "Direct Preference Optimization", 2023, equation 7.
    """
    _check_alike("dpo_loss", chosen, rejected, reference_chosen, reference_rejected)
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -((1 - label_smoothing) * F.logsigmoid(margin) + label_smoothing * F.logsigmoid(-margin)).mean()


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Mean of -chosen - beta * log sigmoid(log odds(chosen) - log odds(rejected)); odds are p / (1 - p), p = e^x.

    chosen, rejected: (B,), means of `sequence_log_probs`, below 0.   There is no reference model.
    Source: Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", 2024, equations 6 and 7.
    """
    _check_alike("orpo_loss", chosen, rejected)
    ratio = (chosen - _log_complement(chosen)) - (rejected - _log_complement(rejected))
    return -(chosen + beta * F.logsigmoid(ratio)).mean()


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Mean of -log sigmoid(beta * (chosen - rejected) - gamma).

    chosen, rejected: (B,), means of `sequence_log_probs`.   gamma: the margin that is aimed at.
    Source: Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, equation 6.
    """
    _check_alike("simpo_loss", chosen, rejected)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()


def kto_loss(
    log_probs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Mean of w * (1 - sigmoid(beta * (r - kl))) for desirable sequences, of w * (1 - sigmoid(beta * (kl - r))) for
    others, with r = log_probs - reference.

    log_probs, reference: (B,), sums of `sequence_log_probs`.   desirable: (B,) bool.   kl: the batch's estimate of the
    distance to the reference model, a constant; negative ones count as 0.
    Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, equation 8.
    """
    _check_alike("kto_loss", log_probs, reference, desirable)
    distance = torch.as_tensor(kl, dtype=log_probs.dtype, device=log_probs.device).detach().clamp(min=0)
    reward = beta * (log_probs - reference - distance)
    losses = torch.sigmoid(torch.where(desirable.bool(), -reward, reward))
    return (torch.where(desirable.bool(), desirable_weight, undesirable_weight) * losses).mean()


def grpo_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    per_token: bool = False,
) -> Tensor:
    """Mean over sequences of the means over tokens of -min(q A, clamp(q, 1 - clip[0], 1 + clip[1]) A) + beta * kl, with
    q = exp(log_probs - old), kl = exp(d) - d - 1 with d = reference - log_probs.

    log_probs, old, reference: (B, S), of the policy, of that which drew the tokens, of the reference model; only the
    first has a gradient.   advantages: (B,).   mask: (B, S), 0 for tokens that do not count.
    per_token: the mean over all tokens of the batch instead (DAPO).
    Source: Shao et al., "DeepSeekMath", 2024, equations 3 and 4.
    """
    _check_alike("grpo_loss", log_probs, old, *(t for t in (mask, reference) if t is not None))
    if log_probs.dim() != 2 or advantages.shape != log_probs.shape[:1]:
        raise InputError(
            f"grpo_loss: log_probs is {tuple(log_probs.shape)}, advantages {tuple(advantages.shape)}; needs (B, S), "
            "(B,)."
        )
    counted = torch.ones_like(log_probs) if mask is None else mask.to(log_probs.dtype)
    ratio, advantage = torch.exp(log_probs - old.detach()), advantages[:, None]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
    if reference is not None and beta:
        distance = reference.detach() - log_probs
        losses = losses + beta * (torch.exp(distance) - distance - 1)
    losses = losses * counted
    return losses.sum() / counted.sum() if per_token else (losses.sum(1) / counted.sum(1)).mean()


def _log_complement(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, without cancellation at either end."""
    near = x > -0.6931471805599453
    small = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def _check_alike(op: str, first: Tensor, *others: Tensor) -> None:
    if any(t.shape != first.shape for t in others):
        shapes = ", ".join(str(tuple(t.shape)) for t in (first, *others))
        raise InputError(f"{op}: shapes are {shapes}; they must be one.")
