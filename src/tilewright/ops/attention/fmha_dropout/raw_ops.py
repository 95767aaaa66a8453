"""The raw ops of `fmha_dropout`, and what the forward saves for the backward."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Gradient, RawOp
from tilewright.ops.attention.bucket import FmhaBucket, backward_bucket, forward_bucket
from tilewright.ops.attention.fmha.raw_ops import gradients_of, outputs_of
from tilewright.ops.attention.fmha_dropout.args import OP, FmhaDropoutArgs, FmhaDropoutBackwardArgs
from tilewright.ops.attention.layout import dense
from tilewright.ops.attention.reference import attention, attention_backward

KERNELS = ("triton.fmha_dropout",)

FORWARD = RawOp(
    OP,
    "fwd",
    FmhaDropoutArgs,
    package="tilewright.ops.attention",
    kernels=KERNELS,
    outputs=outputs_of,
    reference=lambda args: attention(args.fmha, args.dropout),
    bucket=lambda args: forward_bucket(args.fmha),
    bucket_names=FmhaBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    FmhaDropoutBackwardArgs,
    package="tilewright.ops.attention",
    kernels=KERNELS,
    outputs=gradients_of,
    reference=lambda args: attention_backward(args.fmha, args.dropout),
    bucket=lambda args: backward_bucket(args.fmha),
    bucket_names=FmhaBucket._fields,
    count=4,
)


def _save(args: FmhaDropoutArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """All eight tensors of the forward, then both results."""
    operands = args.q, args.k, args.v, args.sinks, args.slopes
    return (*operands, args.seed, args.offset, args.mask_data, *outputs)


def _raw_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: FmhaDropoutArgs, needs: Any
) -> FmhaDropoutBackwardArgs:
    q, k, v, sinks, slopes, seed, offset, mask_data, o, lse = saved
    do, dlse = grads
    # Kernels take do in the operands' dtype with dense rows
    do = torch.zeros_like(o) if do is None else dense(do.to(o.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    mask = args.mask._replace(mask_data=mask_data)
    results = do, dlse, q, k, v, o, lse, sinks, slopes, seed, offset
    return FmhaDropoutBackwardArgs(*results, *mask, args.scale, args.softcap, args.p)


GRADIENT = Gradient(BACKWARD, inputs=("q", "k", "v", "sinks"), save=_save, raw_args=_raw_args, recomputes=False)
