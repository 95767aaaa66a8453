"""Arguments of the raw ops of `mla`, from those of a public call, and their bucket."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError
from tilewright.ops.attention import arguments
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs, MaskArgs
from tilewright.ops.attention.bucket import FmhaBucket, causal_kind, forward_bucket
from tilewright.ops.attention.layout import addressable, by_token, readable
from tilewright.ops.attention.score import Scores

_PLAIN = Scores(0.0, None, None, ())


class MlaArgs(NamedTuple):
    """Arguments of the forward."""

    q: Tensor  # (B, H, S_q, D), unit last stride, as all
    q_pe: Tensor  # (B, H, S_q, D_pe)
    k: Tensor  # (B, H, S_k, D)
    k_pe: Tensor  # (B, 1, S_k, D_pe)
    v: Tensor  # (B, H, S_k, D_v)
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float

    @property
    def mask(self) -> MaskArgs:
        """The four fields of the mask."""
        return MaskArgs(self.mask_data, self.program, self.left, self.right)

    @property
    def without_rope(self) -> FmhaArgs:
        """Those of an `fmha` over q and k alone."""
        return FmhaArgs(self.q, self.k, self.v, None, None, *self.mask, self.scale, 0.0)

    @property
    def joined(self) -> FmhaArgs:
        """Those of the `fmha` over q joined with q_pe and k with k_pe."""
        q, k = joined(self.q, self.q_pe, self.k, self.k_pe)
        return FmhaArgs(q, k, self.v, None, None, *self.mask, self.scale, 0.0)


class MlaBackwardArgs(NamedTuple):
    """Arguments of the backward: the gradients of both results, then the forward's tensors and results."""

    do: Tensor  # (B, H, S_q, D_v)
    dlse: Tensor | None  # (B, H, S_q) float32
    q: Tensor
    q_pe: Tensor
    k: Tensor
    k_pe: Tensor
    v: Tensor
    o: Tensor  # (B, H, S_q, D_v)
    lse: Tensor  # (B, H, S_q) float32
    mask_data: Tensor | None
    program: str
    left: int
    right: int
    scale: float

    @property
    def forward(self) -> MlaArgs:
        """The arguments of the forward."""
        mask = self.mask_data, self.program, self.left, self.right
        return MlaArgs(self.q, self.q_pe, self.k, self.k_pe, self.v, *mask, self.scale)

    def backward_of(self, forward: FmhaArgs) -> FmhaBackwardArgs:
        """Those of the backward of `forward`, this one without rope parts or with joined ones."""
        return FmhaBackwardArgs(
            self.do, self.dlse, forward.q, forward.k, forward.v, self.o, self.lse, None, None, *forward.mask,
            self.scale, 0.0,
        )  # fmt: skip


class MlaBucket(NamedTuple):
    """The tuning key, in both directions; fields as in `FmhaBucket`."""

    BH: int
    S_q: int
    S_k: int
    D: int
    D_pe: int
    D_v: int
    mask: int
    aligned: int


def forward_args(
    q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, causal: bool, mask: Any, scale: float | None
) -> MlaArgs:
    """Arguments of the raw op for tensors that passed `check_dimensions`."""
    merged_mask = arguments.merged("mla", mask, causal)
    if merged_mask is not None and merged_mask.only_flex:
        raise InputError("mla: the mask is a BlockMask with a function of its own, which no kernel here can evaluate.")
    width = q.shape[3] + q_pe.shape[3]
    if scale is None:
        scale = float(width) ** -0.5 if width else 1.0
    plain = arguments.raw_arguments(q, k, v, merged_mask, scale, _PLAIN)
    return MlaArgs(plain.q, readable(q_pe), plain.k, readable(k_pe), plain.v, *plain.mask, plain.scale)


def joined(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, H, S, D + D_pe) of `fmha`, with k_pe repeated for every head; the memory order is that of q and k."""
    return _concatenated(q, q_pe), _concatenated(k, k_pe.expand(-1, k.shape[1], -1, -1))


def _concatenated(x: Tensor, rope: Tensor) -> Tensor:
    """x and rope along columns, in x's order of heads and tokens."""
    if by_token(x):
        return torch.cat((x.transpose(1, 2), rope.transpose(1, 2)), -1).transpose(1, 2)
    return torch.cat((x, rope), -1)


def bucket(args: MlaArgs) -> MlaBucket:
    """The bucket of a forward."""
    return _bucket(args)


def backward_bucket(args: MlaBackwardArgs) -> MlaBucket:
    """The bucket of a backward, whose kernels read do too."""
    return _bucket(args.forward, args.do)


def _bucket(args: MlaArgs, *further: Tensor) -> MlaBucket:
    plain, d_pe = forward_bucket(args.without_rope), hint(args.q_pe.shape[3])
    tensors = (args.q, args.q_pe, args.k, args.k_pe, args.v, *further)
    return MlaBucket(
        BH=plain.BH,
        S_q=plain.S_q,
        S_k=plain.S_k,
        D=plain.D,
        D_pe=d_pe,
        D_v=plain.D_v,
        mask=causal_kind(plain.mask, args.q, args.k, plain.D + d_pe, plain.D_v),
        aligned=int(all(map(addressable, tensors))),
    )


def of_fmha(bucket: MlaBucket) -> FmhaBucket:
    """The bucket of the `fmha` over joined tensors, which chooses the tiles."""
    return FmhaBucket(
        BH=bucket.BH,
        group=1,
        S_q=bucket.S_q,
        S_k=bucket.S_k,
        D=bucket.D + bucket.D_pe,
        D_v=bucket.D_v,
        mask=bucket.mask,
        extras=0,
        aligned=bucket.aligned,
    )
