"""Autocast: the device types that have it, and the cast of a linear layer's operands."""

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")
AUTOCASTS = frozenset(kind for kind in _KINDS if is_autocast_available(kind))
"""Device types that `torch.autocast` supports; read at import, because Dynamo of torch 2.11 cannot trace the query."""


def cast_as_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype that `torch.nn.functional.linear` computes in: autocast's, unless x is float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device not in AUTOCASTS or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
