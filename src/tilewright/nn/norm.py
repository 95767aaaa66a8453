"""Norms as modules: `weight` (and `bias`) in the state_dict, as in torch.nn and in Hugging Face models."""

import torch
from torch import Tensor, nn

from tilewright import ops


class _RMSNormWeight(nn.Module):
    """Weight and options of RMSNorm, with and without a residual add."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        fp32_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.fp32_weight = fp32_weight
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to 1 - offset, so that the scale offset + weight is one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        """Size and options, for `print(model)`."""
        form = f", offset={self.offset:g}" if self.offset else ", fp32_weight=True" if self.fp32_weight else ""
        return f"{self.weight.numel()}, eps={self.eps:g}{form}"


class RMSNorm(_RMSNormWeight):
    """`ops.rms_norm` over the last dimension, of size `dim`.

    offset=1.0 is Gemma's form: the weight is stored around zero and starts there. fp32_weight=True multiplies before
    the cast (GPT-OSS, OLMo 2); the default casts first (Llama, Qwen, Mistral). state_dict: weight (dim,).
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) -> the same shape."""
        return ops.rms_norm(
            x, self.weight, eps=self.eps, offset=self.offset, fp32_weight=self.fp32_weight, backend=self.backend
        )


class AddRMSNorm(_RMSNormWeight):
    """`ops.add_rms_norm`: a residual add and the norm after it in one kernel. Options and state_dict of `RMSNorm`."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual: (..., dim) -> (norm of their sum, their sum)."""
        return ops.add_rms_norm(
            x,
            residual,
            self.weight,
            eps=self.eps,
            offset=self.offset,
            fp32_weight=self.fp32_weight,
            backend=self.backend,
        )


class LayerNorm(nn.Module):
    """`ops.layer_norm` over the last dimension; takes the place of torch.nn.LayerNorm(dim).

    state_dict: weight (dim,), and bias (dim,) unless bias=False.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.backend = backend
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) -> the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        """Size and options, for `print(model)`."""
        return f"{self.weight.numel()}, eps={self.eps:g}{'' if self.bias is not None else ', bias=False'}"
