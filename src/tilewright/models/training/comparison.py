"""Compare a loss and the gradient of every parameter with those of a wider copy of the model."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.models.agreement import FLOOR, Comparison, squares
from tilewright.models.cpu_sizes import every_size_on_ops
from tilewright.models.report import Report

LIMIT = 2.0  # error of the patched model / error of the unpatched one, of the loss and of each parameter's gradient
_NOISE = 1e-2  # of the root mean square of all gradients: a parameter with less is measured against this

Gradients = dict[str, Tensor | None]
Judgement = Literal["by parameter", "together"]


def judgement(model: nn.Module, report: Report) -> Judgement | None:
    """How a patched model's gradients are judged: of a mixture of experts together; None where the loss was left.

    A near-tie sends a token to another expert, whose gradient then is another one.  A model around the one with the
    loss has to take labels and pass other arguments on.
    """
    paths = {row.path for row in report.rows if row.kind == "loss" and row.status == "replaced"}
    parameters = inspect.signature(model.forward).parameters
    passes_on = "labels" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not paths or not ("" in paths or passes_on):
        return None
    mixture = any(row.kind in ("experts", "routers") for row in report.rows)
    return "together" if mixture else "by parameter"


@dataclass(frozen=True)
class LossComparison:
    """Errors of the loss, and of the gradient of `parameter`, which is the one nearest to its limit.

    parameter is empty where the gradient is judged as one vector.
    """

    loss: Comparison
    gradient: Comparison
    parameter: str

    @property
    def passed(self) -> bool:
        """Both within their limits."""
        return self.loss.passed and self.gradient.passed

    def __str__(self) -> str:
        name = f"gradient, worst parameter {self.parameter}" if self.parameter else "gradient of the loss"
        return f"  loss error      {self.loss}\n  {name}: {self.gradient}"


def labels_for(logits: Tensor, attention_mask: Any) -> Tensor:
    """(B, S) random classes, the same on every call; -100 where the mask of the input is 0."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator).to(logits.device)
    if isinstance(attention_mask, Tensor) and attention_mask.shape == labels.shape:
        labels = labels.masked_fill(attention_mask == 0, -100)
    return labels


def loss_and_gradients(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Tensor, Gradients]:
    """The model's loss and its gradients by name; `.grad` is not written."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.set_grad_enabled(bool(trainable)), every_size_on_ops():
        loss: Tensor = model(**kwargs).loss
        gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True) if trainable else ()
    return loss.detach(), dict(zip(trainable, gradients, strict=True))


def compare_losses(
    got: tuple[Tensor, Gradients],
    base: tuple[Tensor, Gradients],
    exact: tuple[Tensor, Gradients],
    dtype: torch.dtype,
    *,
    judged: Judgement,
) -> LossComparison:
    """Compare the patched and the unpatched model's (loss, gradients) with the wider copy's.

    dtype: of the model, whose rounding may be added to each.   judged: each gradient, or all as one vector.
    """
    floor = max(FLOOR, torch.finfo(dtype).eps / 2)
    losses = [_distances({"": result[0]}, {"": exact[0]})[""] for result in (got, base)]
    ours, theirs = (_distances(result[1], exact[1]) for result in (got, base))
    together = judged == "together"
    if together:
        ours, theirs = ({"": math.hypot(*distances.values())} for distances in (ours, theirs))
    scales = _scales(exact[1], together)
    comparisons = {
        name: Comparison(ours[name] / scale, theirs[name] / scale, LIMIT, floor=floor) for name, scale in scales.items()
    }
    worst = max(comparisons, key=lambda name: comparisons[name].excess, default=None)
    scale = abs(float(exact[0])) or 1.0
    return LossComparison(
        Comparison(losses[0] / scale, losses[1] / scale, LIMIT, floor=floor),
        Comparison(0.0, 0.0, LIMIT) if worst is None else comparisons[worst],
        worst or "",
    )


def _distances(got: Gradients, exact: Gradients) -> dict[str, float]:
    """Frobenius norm of the difference of each parameter's gradient."""
    return {name: math.sqrt(squares([got[name]], [exact[name]])[0]) for name in exact}


def _scales(exact: Gradients, together: bool) -> dict[str, float]:
    """What the error of each gradient is relative to."""
    norms = {name: math.sqrt(squares([None], [g])[1]) for name, g in exact.items() if g is not None}
    if not norms:
        return {}
    total = math.hypot(*norms.values()) or 1.0
    if together:
        return {"": total}
    sizes = {name: g.numel() for name, g in exact.items() if g is not None}
    noise = _NOISE * total / math.sqrt(sum(sizes.values()))
    return {name: max(norm, noise * math.sqrt(sizes[name])) for name, norm in norms.items()}
