"""Check that a patched model is as accurate as the unpatched one: compare the logits of each with a wider copy.

Comparing the two with each other would only show that they differ, as any two orders of summation do. Comparing each
with float32 (float64 for a float32 model) shows whether the patch made the model worse.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.models.agreement import MOST, Agreement, Comparison, logits_of, relative_error
from tilewright.models.cpu_sizes import every_size_on_ops
from tilewright.models.training.comparison import (
    Judgement,
    LossComparison,
    compare_losses,
    labels_for,
    loss_and_gradients,
)
from tilewright.models.wide import dominant_dtype, full_precision, wide_copy, wide_dtype

LIMIT = 1.1  # error of the patched model / error of the unpatched one, logits
GRADIENT_LIMIT = 3.0  # the same for all gradients, which pass through every rounding twice


@dataclass(frozen=True)
class Verification:
    """The comparison over `tokens` positions with a wider copy of the unpatched model, described by `reference`."""

    reference: str
    tokens: int
    logits: Comparison
    top1: Agreement
    unpatched_top1: Agreement
    gradients: Comparison | None
    losses: LossComparison | None = None  # where the loss was replaced

    @property
    def passed(self) -> bool:
        """Errors within their limits, and top-1 agreement not below the unpatched model's beyond both intervals.

        In float8 agreement is reported and not judged: close logits change order by the error of float8 alone.
        """
        accurate = all(each is None or each.passed for each in (self.logits, self.gradients, self.losses))
        if self.logits.narrow:
            return accurate
        return accurate and self.top1.interval[1] >= self.unpatched_top1.interval[0]

    def __str__(self) -> str:
        lines = [
            f"{'passed' if self.passed else 'FAILED'}: {self.tokens} tokens against {self.reference}",
            f"  logits error    {self.logits}",
            f"  top-1 agreement {self.top1}, unpatched {self.unpatched_top1}",
        ]
        if self.gradients is not None:
            lines.append(f"  gradient error  {self.gradients}")
        if self.losses is not None:
            lines.append(str(self.losses))
        return "\n".join(lines)


def compare(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any] | None,
    unpatched: AbstractContextManager[None],
    *,
    gradients: bool,
    in_torch: AbstractContextManager[None] | None = None,
    most: float = MOST,
    losses: Judgement | None = None,
) -> Verification:
    """Compare `model` as it is with `model` inside `unpatched`, in evaluation mode; nothing of the model is changed.

    inputs: the tensor that the model takes first (token ids (B, S), pixels), or its keyword arguments; None draws
    random tokens.  Raises InputError where the unpatched model fails on them.  If they hold an `attention_mask`, only
    unmasked positions count.   in_torch: inside it float8 products are torch's; None where nothing runs in float8.
    losses: how to judge the gradients of the loss without logits; None: do not compare it.
    """
    kwargs = keyword_inputs(model, inputs)
    with _evaluation_mode(model):
        with unpatched:
            try:
                base, base_grads = _run(model, kwargs, gradients)
            except Exception as error:
                raise InputError(
                    f"{type(model).__name__}, unpatched, fails on {'random tokens' if inputs is None else 'inputs='}: "
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]} "
                    "Pass inputs= that its forward takes, or verify=False."
                ) from error
            if losses is not None:
                labelled = {"labels": labels_for(base, kwargs.get("attention_mask")), **kwargs}
                base_loss = loss_and_gradients(model, labelled)
            reference_dtype = wide_dtype(model)
            reference = wide_copy(model, reference_dtype, next(model.parameters()).device)
        got, got_grads = _run(model, kwargs, gradients)
        if losses is not None:
            got_loss = loss_and_gradients(model, {**labelled, "skip_logits": True})
        narrow = got
        if in_torch is not None:
            with in_torch:
                narrow, _ = _run(model, kwargs, False)
        with full_precision():
            exact, exact_grads = _run(reference, kwargs, gradients)
            if losses is not None:
                exact_loss = loss_and_gradients(reference, labelled)
    keep = _counted_positions(kwargs, exact)
    got, narrow, base, exact = got[keep], narrow[keep], base[keep], exact[keep]
    return Verification(
        reference=f"the unpatched model in {str(reference_dtype).removeprefix('torch.')}",
        tokens=exact.shape[0],
        logits=Comparison(
            relative_error([got], [exact]),
            relative_error([base], [exact]),
            LIMIT,
            0.0 if in_torch is None else relative_error([narrow], [exact]),
            most,
        ),
        top1=Agreement.of(got, exact),
        unpatched_top1=Agreement.of(base, exact),
        gradients=Comparison(
            relative_error(got_grads, exact_grads), relative_error(base_grads, exact_grads), GRADIENT_LIMIT
        )
        if gradients
        else None,
        losses=None
        if losses is None
        else compare_losses(got_loss, base_loss, exact_loss, dominant_dtype(model), judged=losses),
    )


def random_tokens(model: nn.Module, batch: int = 4, length: int = 64) -> Tensor:
    """(batch, length) token ids, the same on every call, within the model's vocabulary and length."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary is None:
        raise InputError(
            f"{type(model).__name__} has no config.vocab_size to draw random tokens from. "
            "Pass inputs= (token ids or keyword arguments), or verify=False."
        )
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def keyword_inputs(model: nn.Module, inputs: Tensor | Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of a call of `model`, on its device; random tokens for None."""
    takes = list(inspect.signature(model.forward).parameters)
    if inputs is None:
        if "input_ids" not in takes:
            raise InputError(
                f"{type(model).__name__} takes no input_ids, so no random tokens can be drawn for it; its forward "
                f"takes {', '.join(takes[:4])}. Pass inputs= (a dict of keyword arguments), or verify=False."
            )
        inputs = random_tokens(model)
    if isinstance(inputs, Tensor):
        inputs = {"input_ids" if "input_ids" in takes or not takes else takes[0]: inputs}
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs is a {type(inputs).__name__}; needs token ids (B, S) or a dict of keyword arguments.")
    device = next(model.parameters()).device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _run(model: nn.Module, kwargs: dict[str, Any], gradients: bool) -> tuple[Tensor, list[Tensor | None]]:
    """Logits, and the gradients of their sum under fixed random weights; the model's own `.grad` is not written."""
    trainable = [p for p in model.parameters() if p.requires_grad] if gradients else []
    with torch.set_grad_enabled(bool(trainable)), every_size_on_ops():
        logits = logits_of(model(**kwargs))
        if not trainable:
            return logits.detach(), []
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(logits.shape, generator=generator).to(logits)
        grads = torch.autograd.grad((logits * cotangent).sum(), trainable, allow_unused=True)
    return logits.detach(), list(grads)


def _counted_positions(kwargs: dict[str, Any], logits: Tensor) -> Tensor:
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
        return mask.bool()
    return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block; each module gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
