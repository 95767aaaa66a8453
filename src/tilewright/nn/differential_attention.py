"""Differential attention: the difference of two softmaxes over the same values, so that common parts cancel.

Heads come in pairs (h, h + H/2) that read one value of 2 D numbers:

    o = norm(softmax(q_h k_h^T) V - lambda * softmax(q_h' k_h'^T) V) * (1 - lambda_init)

One `fmha` over all H heads with D_v = 2 D computes both: q and k already have its layout, only V is copied, into 2 H_kv
D numbers a token.  Each score costs D + 2 D multiplications and one exponential.  With D_v = D there would be two
calls, one for each half of V: 2 (D + D) multiplications and two exponentials a score; in the backward 2 * 5 D
multiplications instead of 3 D + 2 * 2 D.  Two calls of H/2 heads with D_v = 2 D multiply as much as one.  They copy V
once instead of twice, but need twice the launches with half the blocks each, and in training a copy of dq and dk, which
then come in halves.
"""

import math

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.mask import Mask
from tilewright.nn.attention_base import SelfAttention, Tables
from tilewright.nn.rotary import RotaryEmbedding


class DifferentialAttention(SelfAttention):
    """Self-attention of the Differential Transformer, with the names of transformers' DiffLlamaAttention.

    layer_idx: from 0; lambda_init = 0.8 - 0.6 exp(-0.3 layer_idx), as `lambda_init`.   lambda_std: standard
        deviation of the initial vectors of lambda.   norm_eps: eps of the norm over 2 D numbers.
    num_kv_heads: even.  hidden_size, num_heads, head_dim, causal, sliding_window, scale, softcap, rotary, rotary_dim,
        interleaved, bias, o_bias and backend: as in `Attention`, num_heads and num_kv_heads counting both softmaxes.
    There is no dropout, which the paper does not define here, and no KV cache: decoding is `tilewright.generate`'s.

    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, in float32.
    state_dict: q_proj.weight (H D, hidden_size), k_proj.weight and v_proj.weight (H_kv D, hidden_size), o_proj.weight
    (hidden_size, H D), a bias each if any; lambda_q1, lambda_k1, lambda_q2, lambda_k2 (D,).  The norm has no weight.
    Autocast: as in torch.nn.Linear; the layer runs in the dtype of the projections' results between them.
    Raises InputError for sizes and options that do not go together.
    Source: Ye et al., "Differential Transformer", 2024.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        layer_idx: int,
        lambda_std: float = 0.1,
        norm_eps: float = 1e-5,
        causal: bool = True,
        sliding_window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rotary: RotaryEmbedding | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        bias: bool = False,
        o_bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            causal=causal,
            sliding_window=sliding_window,
            scale=scale,
            softcap=softcap,
            rotary=rotary,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            bias=bias,
            o_bias=o_bias,
            device=device,
            dtype=dtype,
            backend=backend,
        )
        if self.num_kv_heads % 2:
            raise self._error(f"num_kv_heads is {self.num_kv_heads}; heads come in pairs, so it must be even")
        if layer_idx < 0:
            raise self._error(f"layer_idx is {layer_idx}; layers count from 0")
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.lambda_std, self.norm_eps = lambda_std, norm_eps

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(self.head_dim, device=device, dtype=dtype))

        self.lambda_q1, self.lambda_k1 = vector(), vector()
        self.lambda_q2, self.lambda_k2 = vector(), vector()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors of lambda; the projections have their own `reset_parameters`."""
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=self.lambda_std)

    def forward(
        self,
        x: Tensor,
        position_embeddings: Tables | None = None,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """x: (B, S, hidden_size) -> the same shape.  Arguments and errors of `Attention.forward`."""
        q, k, v = self._project(x)
        q, k = self._rotate(q, k, position_embeddings, positions, v.dtype)
        o = self._attend(q, k, self._pairs(v), mask)  # (B, S, H, 2 D)
        first, second = o.chunk(2, 2)
        o = torch.addcmul(first, second, self._lambda().to(o.dtype), value=-1)
        # 1 - lambda_init as the norm's weight saves a pass over o, and the layer's dtype does not round the factor
        norm_dtype = torch.promote_types(o.dtype, torch.float32)
        weight = o.new_full((o.shape[-1],), 1.0 - self.lambda_init, dtype=norm_dtype)
        o = ops.rms_norm(o, weight, eps=self.norm_eps, fp32_weight=True)
        result: Tensor = self.o_proj(o.flatten(2))
        return result

    def _pairs(self, v: Tensor) -> Tensor:
        """v (B, S, H_kv, D) -> (B, H_kv, S, 2 D): heads j and j + H_kv/2 concatenated, once for each softmax."""
        b, s, heads, d = v.shape
        halves = v.unflatten(2, (2, heads // 2)).transpose(2, 3)  # (B, S, H_kv/2, 2, D)
        both = halves[:, :, None].expand(b, s, 2, heads // 2, 2, d)
        return both.reshape(b, s, heads, 2 * d).transpose(1, 2)

    def _lambda(self) -> Tensor:
        sum_dtype = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = (self.lambda_q1 * self.lambda_k1).sum(dtype=sum_dtype).exp()
        second = (self.lambda_q2 * self.lambda_k2).sum(dtype=sum_dtype).exp()
        return first - second + self.lambda_init
