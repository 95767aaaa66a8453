"""GroupNorm as a module."""

import torch
from torch import Tensor, nn

from tilewright import ops


class GroupNorm(nn.Module):
    """`ops.group_norm`; takes the place of torch.nn.GroupNorm(num_groups, num_channels).

    state_dict: weight (num_channels,) and bias (num_channels,), neither with affine=False.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.backend = backend
        self.weight = nn.Parameter(torch.ones(num_channels, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels, device=device, dtype=dtype)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, num_channels, ...) -> the same shape."""
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        """Sizes and options, for `print(model)`."""
        plain = "" if self.weight is not None else ", affine=False"
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps:g}{plain}"
