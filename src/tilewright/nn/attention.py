"""Self-attention as a module: the layer of Llama, Qwen, Mistral, Gemma and GPT-OSS, on `ops.fmha`."""

import torch
from torch import Tensor, nn

from tilewright.mask import Mask
from tilewright.nn.attention_base import SelfAttention, Tables
from tilewright.nn.norm import RMSNorm
from tilewright.nn.rotary import RotaryEmbedding
from tilewright.ops.attention.checks import check_dropout


class Attention(SelfAttention):
    """o_proj(fmha(rope(q_norm(q_proj(x))), rope(k_norm(k_proj(x))), v_proj(x))).

    num_heads, num_kv_heads: H and H_kv; H is a multiple of H_kv (default H).   head_dim: D, default hidden_size / H.
    causal: a query sees itself and earlier tokens.   sliding_window: only the last `sliding_window` of these, itself
        included, as in transformers.   scale: of the scores, default D^-0.5.   softcap: as in `ops.fmha` (Gemma 2).
    sinks: a learned score for each head that joins the denominator, initially 0 (GPT-OSS).
    qk_norm: an `RMSNorm` over each head of q and k (Qwen 3), options norm_eps and norm_offset; offset 1 is Gemma 3.
    dropout: dropout of the probabilities, in training; not with softcap or sinks.
    rotary: the layer rotates q and k with this module; layers may share one.  Without it the position_embeddings of
        the call rotate them, if given: rotary_dim and interleaved describe these, as in `ops.apply_rope` (GPT-OSS:
        rotary_dim=D; GLM: interleaved).
    bias: biases of q_proj, k_proj, v_proj, and of o_proj unless o_bias is given (Qwen 2: bias=True, o_bias=False).
    backend: run `fmha` on exactly this backend or raise BackendError.

    state_dict, names and shapes of transformers' LlamaAttention and its like: q_proj.weight (H D, hidden_size),
    k_proj.weight and v_proj.weight (H_kv D, hidden_size), o_proj.weight (hidden_size, H D), a bias each if any,
    q_norm.weight and k_norm.weight (D,), sinks (H,).
    Autocast: as in torch.nn.Linear; the layer runs in the dtype of the projections' results between them.
    There is no KV cache: decoding is `tilewright.generate`'s.
    Raises InputError for sizes and options that do not go together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        causal: bool = True,
        sliding_window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        dropout: float = 0.0,
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
        check_dropout(type(self).__name__, dropout)
        if dropout and (sinks or softcap is not None):
            raise self._error("dropout goes with masks alone, not with sinks or softcap")
        self.dropout = dropout

        def norm() -> RMSNorm | None:
            return RMSNorm(self.head_dim, norm_eps, offset=norm_offset, device=device, dtype=dtype) if qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the sinks to 0; projections and norms have their own `reset_parameters`."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        position_embeddings: Tables | None = None,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """x: (B, S, hidden_size) -> the same shape.

        position_embeddings: (cos, sin), (B or 1, S, columns) each, as transformers' rotary modules return them.
        positions: (B or 1, S) int, rows of the tables of the layer's own `rotary`; None means 0 to S - 1.
        mask: a mask of tilewright.mask, in place of causal and sliding_window:
            `causal() & document(ids)`, `causal() | prefix(n)`.  Make it once for all layers.
        Raises InputError for other shapes, for tables or positions that this layer cannot use, and as `ops.fmha` does.
        """
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, k, position_embeddings, positions, v.dtype)
        dropout = self.dropout if self.training else 0.0
        o = self._attend(q, k, v.transpose(1, 2), mask, sinks=self.sinks, dropout=dropout)
        result: Tensor = self.o_proj(o.flatten(2))
        return result
