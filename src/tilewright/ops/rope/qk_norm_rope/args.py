"""Raw arguments of `qk_norm_rope`, forward and backward."""

from typing import NamedTuple

from torch import Tensor

from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs


class QkNormRopeArgs(NamedTuple):
    q: Tensor  # (B, H, S, D), or packed (T, H, D)
    k: Tensor  # (B, H_kv, S, D), or packed (T, H_kv, D)
    q_weight: Tensor  # (D,)
    k_weight: Tensor  # (D,)
    cos: Tensor  # (B or 1, S, W), or packed (T, W); with positions a table (P, W)
    sin: Tensor  # as cos
    positions: Tensor | None  # (B or 1, S), or packed (T,)
    eps: float
    offset: float
    fp32_weight: bool
    interleaved: bool
    rotary_dim: int  # R; 0: W

    def as_rotation(self) -> ApplyRopeArgs:
        """The call of `apply_rope` without the norms."""
        return ApplyRopeArgs(self.q, self.k, self.cos, self.sin, self.positions, self.interleaved, self.rotary_dim)


class QkNormRopeBackwardArgs(NamedTuple):
    dyq: Tensor  # as q
    dyk: Tensor  # as k
    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    eps: float
    offset: float
    fp32_weight: bool
    interleaved: bool
    rotary_dim: int
    need_dweight: bool

    def forward(self) -> QkNormRopeArgs:
        """The call whose gradients are wanted."""
        return QkNormRopeArgs(*self[2:-1])

    def as_rotation(self) -> ApplyRopeArgs:
        """The call of `apply_rope` without the norms."""
        return self.forward().as_rotation()
