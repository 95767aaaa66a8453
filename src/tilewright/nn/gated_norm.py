"""RMSNorm with a gate as a module."""

import torch
from torch import Tensor, nn

from tilewright import ops


class RMSNormGated(nn.Module):
    """`ops.rms_norm_gated` over the last dimension, of size `dim`.

    The defaults are Qwen3-Next's; norm_before_gate=False is Mamba-2's, with group_size Zamba-2's and Nemotron-H's;
    fp32_weight=True rounds once, as Falcon-H1 and Kimi-Linear do. state_dict: weight (dim,).
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        norm_before_gate: bool = True,
        group_size: int | None = None,
        fp32_weight: bool = False,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.fp32_weight = fp32_weight
        self.activation = activation
        self.backend = backend
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: (..., dim) -> the same shape."""
        return ops.rms_norm_gated(
            x,
            gate,
            self.weight,
            eps=self.eps,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
            fp32_weight=self.fp32_weight,
            activation=self.activation,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Size and options, for `print(model)`."""
        groups = "" if self.group_size is None else f", group_size={self.group_size}"
        order = "" if self.norm_before_gate else ", norm_before_gate=False"
        return f"{self.weight.numel()}, eps={self.eps:g}{order}{groups}"
