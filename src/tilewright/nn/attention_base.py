"""Base class of self-attention layers: projections by token, rotary embedding, default mask."""

from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError
from tilewright.mask import Mask, causal, window
from tilewright.nn.rotary import RotaryEmbedding
from tilewright.ops.attention.checks import check_scale
from tilewright.ops.attention.score import softcap as checked_softcap

Tables = tuple[Tensor, Tensor]
"""cos and sin, one row a token: (B or 1, S, columns)."""


class SelfAttention(nn.Module):
    """q_proj, k_proj, v_proj and o_proj with the options that every subclass has."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        *,
        causal: bool,
        sliding_window: int | None,
        scale: float | None,
        softcap: float | None,
        rotary: RotaryEmbedding | None,
        rotary_dim: int | None,
        interleaved: bool,
        bias: bool,
        o_bias: bool | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        backend: str | None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None:
            if num_heads < 1 or hidden_size % num_heads:
                raise self._error(f"hidden_size {hidden_size} is no multiple of {num_heads} heads. Give head_dim")
            head_dim = hidden_size // num_heads
        if min(hidden_size, num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
            raise self._error(
                f"hidden_size {hidden_size}, num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}; "
                "all must be at least 1, and num_heads a multiple of num_kv_heads"
            )
        if scale is not None:
            check_scale(type(self).__name__, scale)
        if rotary is not None and (rotary_dim is not None or interleaved):
            raise self._error("rotary_dim and interleaved are of tables given to a call; rotary has its own")
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = (
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        self.causal, self.sliding_window, self.scale = causal, sliding_window, scale
        self.softcap = None if softcap is None else checked_softcap(softcap).limit
        self.rotary_dim, self.interleaved, self.backend = rotary_dim, interleaved, backend
        self._mask = self._default_mask()
        o_bias = bias if o_bias is None else o_bias
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias, device, dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias, device, dtype)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias, device, dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, o_bias, device, dtype)
        self.rotary = rotary

    def extra_repr(self) -> str:
        """Heads, and options that differ from plain causal attention, for `print(model)`."""
        options = {
            "causal": None if self.causal else False,
            "sliding_window": self.sliding_window,
            "scale": self.scale,
            "softcap": self.softcap,
            "backend": self.backend,
        }
        sizes = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return sizes + "".join(f", {k}={v}" for k, v in options.items() if v is not None)

    def _default_mask(self) -> Mask | None:
        if self.sliding_window is None:
            return causal() if self.causal else None
        if not self.causal:
            raise self._error("sliding_window is of causal attention. Without, call with mask=window(left, right)")
        if isinstance(self.sliding_window, bool) or not isinstance(self.sliding_window, int) or self.sliding_window < 1:
            raise self._error(f"sliding_window is {self.sliding_window!r}; needs a number of keys from 1, or None")
        return window(self.sliding_window - 1)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, S, H, D), k and v (B, S, H_kv, D)."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.hidden_size:
            actual = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise self._error(f"x is {actual}; needs (B, S, {self.hidden_size})")
        d = self.head_dim
        return (
            self.q_proj(x).unflatten(-1, (self.num_heads, d)),
            self.k_proj(x).unflatten(-1, (self.num_kv_heads, d)),
            self.v_proj(x).unflatten(-1, (self.num_kv_heads, d)),
        )

    def _rotate(
        self, q: Tensor, k: Tensor, tables: Tables | None, positions: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """q (B, H, S, D) and k (B, H_kv, S, D) in `dtype`, rotated by `tables`, by `self.rotary`, or not at all."""
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if positions is not None and self.rotary is None:
            raise self._error("positions are rows of the tables of rotary, which this layer has not")
        if tables is not None:
            if self.rotary is not None:
                raise self._error("position_embeddings are given and the layer has a rotary of its own")
            if not isinstance(tables, (tuple, list)) or len(tables) != 2:
                raise self._error(f"position_embeddings is a {type(tables).__name__}; needs the pair (cos, sin)")
            q, k = ops.apply_rope(q, k, *tables, interleaved=self.interleaved, rotary_dim=self.rotary_dim)
        elif self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        # q and k are wider than v if autocast's projections met norms with float32 parameters
        return q.to(dtype), k.to(dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **options: Any) -> Tensor:
        """Attention of q, k, v (B, H, S, D): (B, S, H, D_v)."""
        o: Any = ops.fmha(
            q,
            k,
            v,
            mask=self._mask if mask is None else mask,
            scale=self.scale,
            softcap=self.softcap,
            backend=self.backend,
            **options,
        )
        result: Tensor = o.transpose(1, 2)  # contiguous: fmha writes by token
        return result

    def _error(self, what: str) -> InputError:
        return InputError(f"{type(self).__name__}: {what}.")
