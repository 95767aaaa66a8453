"""Gated MLPs as modules: gate_proj, up_proj and down_proj, as in Hugging Face models."""

from typing import Literal

import torch
from torch import Tensor, nn

from tilewright import ops


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), the product in one kernel."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)


class SwiGLUMLP(_GatedMLP):
    """The MLP of Llama, Qwen and Mistral, on `ops.swiglu`.

    state_dict: gate_proj.weight and up_proj.weight (intermediate_size, hidden_size), down_proj.weight transposed,
    biases if any.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden_size) -> the same shape."""
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), backend=self.backend))


class GeGLUMLP(_GatedMLP):
    """The MLP of Gemma, on `ops.geglu`; GELU by tanh, or exact with approximate="none".

    state_dict: as in `SwiGLUMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        approximate: Literal["tanh", "none"] = "tanh",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype, backend=backend)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden_size) -> the same shape."""
        inner = ops.geglu(self.gate_proj(x), self.up_proj(x), approximate=self.approximate, backend=self.backend)
        return self.down_proj(inner)

    def extra_repr(self) -> str:
        """The form of GELU, for `print(model)`."""
        return f"approximate={self.approximate!r}"
