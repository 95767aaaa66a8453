"""Losses as modules: `weight` (and the linear layer) in the state_dict, as in torch.nn."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError
from tilewright.hardware.autocast import cast_as_linear


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`ops.cross_entropy`; takes the place of torch.nn.CrossEntropyLoss for class indices.

    z_loss, softcap: as in `ops.cross_entropy`.   The result is float32, whatever dtype the input has.
    state_dict: weight (C,), if it is given.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss, self.softcap, self.backend = z_loss, softcap, backend

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (C), (N, C) or (N, C, ...)   target: the same without C, int64|int32.   Returns (), or as target.

        Input of three dimensions or more costs a copy with the classes last.
        Raises InputError for probabilities as targets.
        """
        if target.is_floating_point():
            raise InputError(
                f"CrossEntropyLoss: target is {target.dtype}; needs class indices, int64 or int32. For probabilities "
                "use torch.nn.CrossEntropyLoss."
            )
        loss = ops.cross_entropy(
            input.movedim(1, -1) if input.dim() > 2 else input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            backend=self.backend,
        )
        assert isinstance(loss, Tensor)
        return loss


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and the cross entropy of its output, by `ops.linear_cross_entropy`: no logits in memory.

    Takes the place of torch.nn.LinearCrossEntropyLoss (torch 2.13) for class indices and one output.  For a tied head
    assign the embedding's weight to `linear.weight`.  Under autocast hidden states and weight are cast as for a linear
    layer.
    state_dict: linear.weight (num_classes, in_features), linear.bias if bias=True, weight (num_classes,) if given.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.z_loss, self.softcap, self.backend = z_loss, softcap, backend

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (..., in_features)   target: (...) int64|int32.   Returns float32: (), or as target."""
        return self._loss_by(ops.linear_cross_entropy, input, target)

    def _loss_by(self, function: Callable[..., Tensor], input: Tensor, target: Tensor) -> Tensor:
        """The loss of this layer and these options by `function`, which takes the arguments of the op."""
        hidden, weight, bias = cast_as_linear(input, self.linear.weight, self.linear.bias)
        return function(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Options that are not the default, for `print(model)`."""
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
        options = {name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value}
        return ", ".join(f"{name}={value!r}" for name, value in {"reduction": self.reduction, **options}.items())
