"""Attention of models: which function a patched model runs (`choice`), and `ops.fmha` for transformers to call."""

from tilewright.models.attention.choice import Rebinding, lost_by_sdpa, switch
from tilewright.models.attention.interface import register_attention

__all__ = ["Rebinding", "lost_by_sdpa", "register_attention", "switch"]
