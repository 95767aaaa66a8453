"""`mla` in plain torch, from the raw arguments: `fmha` over joined tensors."""

from torch import Tensor

from tilewright.ops.attention.mla.args import MlaArgs, MlaBackwardArgs
from tilewright.ops.attention.reference import attention, attention_backward


def joined_attention(args: MlaArgs) -> tuple[Tensor, Tensor]:
    """(o, lse) of the attention over joined tensors; differentiable in all five."""
    return attention(args.joined)


def joined_attention_backward(args: MlaBackwardArgs) -> tuple[Tensor, ...]:
    """(dq, dq_pe, dk, dk_pe, dv): parts of the joined gradients; dk_pe is the sum over heads, in float32."""
    d = args.q.shape[3]
    dq, dk, dv, _ = attention_backward(args.backward_of(args.forward.joined))
    dk_pe = dk[..., d:].sum(1, keepdim=True, dtype=args.lse.dtype).to(args.k_pe.dtype)
    return dq[..., :d], dq[..., d:], dk[..., :d], dk_pe, dv
