"""The raw ops of `mla`, forward and backward, their reference, and what the forward saves for the backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.dispatch.bucket import hint
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops.attention.fmha import raw as fmha
from tilewright.ops.attention.layout import addressable, by_token, dense, spec_like
from tilewright.ops.attention.reference import attention, attention_backward
from tilewright.ops.rows import accumulate_dtype

BUCKET = ("BH", "S_q", "S_k", "D", "D_pe", "D_v", "mask", "aligned")
"""What a choice of kernel may depend on, in both directions; BH, S_q and S_k in powers of two, `mask` as in fmha."""

_INPUTS = "Tensor q, Tensor q_pe, Tensor k, Tensor k_pe, Tensor v"
_SCALARS = "str program, int left, int right, float scale"


def of_fmha(bucket: Sequence[int]) -> tuple[int, ...]:
    """The bucket of the `fmha` over q joined with q_pe and k with k_pe, which chooses the tiles."""
    batch_heads, s_q, s_k, d, d_pe, d_v, mask, aligned = bucket
    return batch_heads, 1, s_q, s_k, d + d_pe, d_v, mask, 0, aligned


def joined(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, H, S, D + D_pe) of `fmha`, with k_pe repeated for every head; the memory order is that of q and k."""
    return _concatenated(q, q_pe), _concatenated(k, k_pe.expand(-1, k.shape[1], -1, -1))


def _concatenated(x: Tensor, rope: Tensor) -> Tensor:
    """x and rope along columns, in x's order of heads and tokens."""
    if by_token(x):
        return torch.cat((x.transpose(1, 2), rope.transpose(1, 2)), -1).transpose(1, 2)
    return torch.cat((x, rope), -1)


def reference(
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the attention over joined tensors; differentiable in all five."""
    return attention(*joined(q, q_pe, k, k_pe), v, None, None, mask_data, program, left, right, scale, 0.0)


def reference_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """(dq, dq_pe, dk, dk_pe, dv): parts of the joined gradients; dk_pe is the sum over heads, in float32."""
    d = q.shape[3]
    rest = (None, None, mask_data, program, left, right, scale, 0.0)
    dq, dk, dv, _ = attention_backward(do, dlse, *joined(q, q_pe, k, k_pe), v, o, lse, *rest)
    dk_pe = dk[..., d:].sum(1, keepdim=True, dtype=lse.dtype).to(k_pe.dtype)
    return dq[..., :d], dq[..., d:], dk[..., :d], dk_pe, dv


def _bucket(tensors: Sequence[Tensor], program: str, left: int, right: int) -> tuple[int, ...]:
    """The bucket of a call.  tensors: q, q_pe, k, k_pe, v, and what else the kernel reads."""
    q, q_pe, k, _, v = tensors[:5]
    modifiers, scale, softcap = (None,) * 3, 1.0, 0.0
    batch_heads, _, s_q, s_k, d, d_v, mask, _, _ = fmha.bucket(
        q, k, v, *modifiers, program, left, right, scale, softcap
    )
    aligned = int(all(map(addressable, tensors)))
    return batch_heads, s_q, s_k, d, hint(q_pe.shape[3]), d_v, mask, aligned


def _forward_bucket(
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
) -> tuple[int, ...]:
    return _bucket((q, q_pe, k, k_pe, v), program, left, right)


def _backward_bucket(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
) -> tuple[int, ...]:
    return _bucket((q, q_pe, k, k_pe, v, do), program, left, right)


def _outputs(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, *_: Any) -> tuple[OutputSpec, ...]:
    """o has the memory order of q; lse is (B, H, S_q) contiguous."""
    return spec_like(q, v.shape[3]), (tuple(q.shape[:3]), accumulate_dtype(q.dtype))


def _gradients(
    do: Tensor, dlse: Tensor | None, q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, *_: Any
) -> tuple[OutputSpec, ...]:
    """Each gradient has the memory order of its operand."""
    return tuple(spec_like(t, t.shape[3]) for t in (q, q_pe, k, k_pe, v))


def _save(args: Sequence[Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """All six tensors of the forward, then both results."""
    return (*args[:6], *outputs)


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    *inputs, mask_data, o, lse = saved
    do, dlse = grads
    # Kernels take do in the operands' dtype with dense rows
    do = torch.zeros_like(o) if do is None else dense(do.to(o.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    return do, dlse, *inputs, o, lse, mask_data, *args[6:]


def _torch_first(bucket: tuple[int, ...], dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes: where it has a fused kernel over joined tensors, but not
    before CUDA C++, which took 0.80 to 0.89 of cuDNN's time over tensors joined beforehand in ten rows on an H200.
    """
    return dtype.itemsize == 4 or (first != "cuda" and bucket[BUCKET.index("mask")] in (fmha.FULL, fmha.CAUSAL))


FORWARD = RawOp(
    "mla",
    "fwd",
    f"{_INPUTS}, Tensor? mask_data, {_SCALARS}",
    package="tilewright.ops.attention.mla",
    outputs=_outputs,
    reference=reference,
    bucket=_forward_bucket,
    bucket_names=BUCKET,
    count=2,
    torch_first=_torch_first,
)
BACKWARD = RawOp(
    "mla",
    "bwd",
    f"Tensor do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, Tensor? mask_data, {_SCALARS}",
    package="tilewright.ops.attention.mla",
    outputs=_gradients,
    reference=reference_backward,
    bucket=_backward_bucket,
    bucket_names=BUCKET,
    count=5,
    torch_first=_torch_first,
)
GRADIENT = Gradient(BACKWARD, inputs=(0, 1, 2, 3, 4), save=_save, raw_args=_raw_args, recomputes=False)
"""Gradients of q, q_pe, k, k_pe and v."""
