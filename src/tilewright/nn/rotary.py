"""Rotary position embedding as a module that owns its tables."""

from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.rope.tables import RopeConfig, rope_table


class RotaryEmbedding(nn.Module):
    """`ops.apply_rope` with tables for all positions, computed once by `ops.rope.tables`.

    config: a Hugging Face configuration, or `RopeConfig(head_dim, max_position_embeddings, rope_parameters)` with any
        rope_type of `ops.rope.tables`: default, linear, dynamic (NTK), llama3, yarn, ...
    length: rows of the tables; default config.max_position_embeddings.
    interleaved: pairs (2i, 2i + 1) instead of (i, i + R/2).
    layer_type: the layer type whose parameters apply, for a config that has them by type (Gemma 3).
    dtype: dtype of the tables. float32 is more accurate; Hugging Face rounds its tables to the model's dtype, and
        so does `.to(dtype)` here.
    Nothing enters the state_dict: the tables are buffers that are not learned.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: RopeConfig | Any,
        *,
        length: int | None = None,
        interleaved: bool = False,
        layer_type: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.backend = backend
        cos, sin = rope_table(config, length=length, layer_type=layer_type, dtype=dtype, device=device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(q', k') of the shapes of q (B, H, S, D) and k (B, H_kv, S, D).

        positions: (B or 1, S) int, the row of the tables for each token; None means 0 to S - 1.
        Raises InputError for a sequence longer than the tables.
        """
        if positions is not None:
            return ops.apply_rope(
                q, k, self.cos, self.sin, interleaved=self.interleaved, positions=positions, backend=self.backend
            )
        length = q.shape[-2]
        if length > self.cos.shape[0]:
            raise InputError(
                f"q has {length} tokens, the tables {self.cos.shape[0]} rows. Make them with length={length}."
            )
        cos, sin = self.cos[None, :length], self.sin[None, :length]
        return ops.apply_rope(q, k, cos, sin, interleaved=self.interleaved, backend=self.backend)

    def extra_repr(self) -> str:
        """Rows and columns of the tables, for `print(model)`."""
        rows, columns = self.cos.shape
        return f"positions={rows}, rotary_dim={columns}{', interleaved' if self.interleaved else ''}"
