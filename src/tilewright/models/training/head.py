"""Run a causal language model's own forward so that its head and its loss become one op.

The forward calls `self.lm_head(hidden)`, may scale or cap the logits, and calls `self.loss_function(logits, labels)`.
Here it is called with a `_View` in place of `self`.  The view's head keeps its input and returns logits of no
classes, which scale and cap without cost.  The view's loss calls the head module, whose replaced forward computes
`ops.linear_cross_entropy` of what was kept.  All else (caches, router losses, fields of the result) is the model's.
The head is called as a module, because FSDP gathers its weight in a hook of that call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError
from tilewright.hardware.autocast import cast_as_linear
from tilewright.models.transformers_names import causal_lm_loss

Form = Literal["plain", "softcap", "multiplied", "divided"]


class LossCall(NamedTuple):
    """What the head needs beside its input to compute a loss."""

    target: Tensor  # (B, S), shifted: the class that each position predicts
    ignore_index: int
    reduction: str
    scale: float  # of the logits
    softcap: float | None
    backend: str | None


@dataclass(frozen=True)
class HeadRecipe:
    """A linear layer that computes the loss of its output where it is called with a `LossCall`."""

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, input, loss=None) -> logits (..., V), or with `loss` a float32 number."""

        def forward(self: nn.Linear, input: Tensor, loss: LossCall | None = None) -> Tensor:
            if loss is None:
                logits: Tensor = cls.forward(self, input)
                return logits
            if hasattr(self.weight, "_local_tensor"):  # a DTensor, whose import costs a second
                raise InputError(
                    "the head's weight is a DTensor, of which ops.linear_cross_entropy would see one part. Patch with "
                    'ops= without "loss", keep the head out of the tensor-parallel plan, or give hidden states to '
                    "tilewright.distributed.vocab_parallel_linear_cross_entropy."
                )
            hidden, weight, bias = cast_as_linear(input, self.weight, self.bias)
            return ops.linear_cross_entropy(
                hidden if loss.scale == 1.0 else hidden * loss.scale,
                weight,
                loss.target,
                bias,
                ignore_index=loss.ignore_index,
                softcap=loss.softcap,
                reduction=loss.reduction,
                backend=loss.backend,
            )

        return forward


@dataclass(frozen=True)
class LossRecipe:
    """The forward of a causal language model, with its loss by `ops.linear_cross_entropy` in training.

    head: name of the last linear layer.   form, where: what happens to logits, and the attribute that holds its number.
    labels: place of `labels` among the arguments after self.
    """

    head: str
    form: Form
    where: str
    labels: int
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, ..., skip_logits=None), with the original's other arguments, defaults and result."""
        original = cls.forward
        position, recipe = self.labels, self

        @wraps(original)
        def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            labels = args[position] if len(args) > position else kwargs.get("labels")
            if skip_logits and labels is None:
                raise InputError("skip_logits=True leaves nothing to compute without labels. Pass labels, or drop it.")
            if labels is None or not (self.training if skip_logits is None else skip_logits) or not standard_loss(self):
                return original(self, *args, **kwargs)
            output = original(_View(self, recipe), *args, **kwargs)
            if isinstance(output, tuple):  # of return_dict=False, which leaves out what is None
                return tuple(each for each in output if not (isinstance(each, Tensor) and each.shape[-1:] == (0,)))
            output.logits = None
            return output

        return forward

    def __str__(self) -> str:
        words = {"plain": "", "softcap": ", capped by ", "multiplied": ", times ", "divided": ", divided by "}
        return f"ops.linear_cross_entropy of {self.head}{words[self.form]}{self.where}, no logits in training"


def standard_loss(model: Any) -> bool:
    """Is the loss of this model transformers' own for causal language models?"""
    return model.loss_function is causal_lm_loss()


class _View:
    """The model as its own forward sees it: everything is the model's, except its head and its loss."""

    def __init__(self, model: Any, recipe: LossRecipe) -> None:
        self.tilewright_model = model
        self.tilewright_recipe = recipe
        self.tilewright_hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == self.tilewright_recipe.head:
            return self.tilewright_head
        return getattr(self.tilewright_model, name)

    def tilewright_head(self, hidden: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, 0): keep the input for the loss."""
        self.tilewright_hidden = hidden
        return hidden[..., :0]

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """The loss of what the head was given; arguments as of transformers' `ForCausalLMLoss`, which ignores others.

        logits: (B, S, 0), of no use.   labels: (B, S).   num_items_in_batch: divides the sum; None: the mean.
        """
        recipe, hidden = self.tilewright_recipe, self.tilewright_hidden
        assert hidden is not None
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
        number = 1.0 if recipe.form == "plain" else attrgetter(recipe.where)(self.tilewright_model)
        call = LossCall(
            target,
            ignore_index,
            "mean" if num_items_in_batch is None else "sum",
            {"multiplied": number, "divided": 1.0 / number}.get(recipe.form, 1.0),
            number if recipe.form == "softcap" else None,
            recipe.backend,
        )
        loss: Tensor = getattr(self.tilewright_model, recipe.head)(hidden, call)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
