"""Attention over scaled float8, forward."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.dispatch.raw import OutputSpec
from tilewright.mask import Mask
from tilewright.ops.attention.checks import check_layout
from tilewright.ops.attention.fmha_fp8 import samples
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args, FmhaFp8Bucket, Options, bucket, raw_arguments
from tilewright.ops.attention.fmha_fp8.checks import check, check_dimensions
from tilewright.ops.attention.fmha_fp8.cost import cost
from tilewright.ops.attention.fmha_fp8.reference import attention
from tilewright.ops.attention.fmha_fp8.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.attention.layout import spec_like
from tilewright.ops.quant.numbers import E4M3


@dispatch("fmha_fp8")
def fmha_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = "BHSD",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = softmax(s) (v * v_scale), s = scale * (q * q_scale) (k * k_scale)^T, over the keys a query may see.

    q: (B, H, S_q, D)   k: (B, H_kv, S_k, D)   v: (B, H_kv, S_k, D_v), float8_e4m3fn, or (B, S, H, D) each with
    layout="BSHD".  Query head h reads key head h // (H / H_kv).  Strides are free, the last of 1: another costs a copy.
    q_scale, k_scale, v_scale: float32, positive and finite, which is not checked.  Each as its shape says: (B, H) one
    for each head, or (B, H, ceil(S / 128)) one for each 128 tokens of a head; H and S are those of its operand, in this
    order whatever the layout.
    Returns o (B, H, S_q, D_v) in `out_dtype` (bf16|fp16|fp32), which lies in memory as q does; with return_lse also lse
    (B, H, S_q) float32, the natural logarithm of the softmax's denominator.  scale: D^-0.5 by default.

    causal: mask & causal().   mask: one of tilewright.mask, or several of them with & | ~.
    window: (left, right), the keys that a query sees before and after its position, -1 for no limit; joins both.
    The position of query i is i + S_k - S_q: the last query sees the last key.  A query that may see nothing gets 0,
    and lse -inf (with a sink, lse is the sink).
    softcap: s = softcap * tanh(s / softcap).   sinks: (H,), exp(sinks[h]) joins the denominator.

    Scores, softmax and sums are float32; probabilities are rounded to e4m3, as 2^8 e^(s - m) with m the largest score
    of the row so far, before the product with v: half a step is at most 2^-4 of a probability.  GPUs without e4m3, and
    Triton for a few queries behind many keys, round them to float16 instead.  A NaN in a key that a query may not see
    does not reach it; in a value it may reach queries of the same tile.  There is no gradient and no out=.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes, scales and masks that do not go together, and where a gradient is wanted.
    Source: Shah et al., "FlashAttention-3", 2024.
    """
    check_layout("fmha_fp8", layout)
    check_dimensions(q=q, k=k, v=v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options = Options(causal, window, mask, scale, softcap, sinks, out_dtype)
    o, lse = call(CONTRACT, raw_arguments(q, k, v, q_scale, k_scale, v_scale, options), backend)
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = "BHSD",
) -> Any:
    """The same in plain torch; probabilities are rounded as in kernels where the operands are e4m3."""
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options = Options(causal, window, mask, scale, softcap, sinks, out_dtype)
    o, lse = attention(raw_arguments(q, k, v, q_scale, k_scale, v_scale, options))
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _outputs(args: FmhaFp8Args) -> tuple[OutputSpec, ...]:
    """o has the memory order of q; lse is (B, H, S_q) contiguous."""
    shape, _, strides = spec_like(args.q, args.v.shape[3])
    return (shape, args.out_dtype, strides), (tuple(args.q.shape[:3]), torch.float32)


FORWARD = RawOp(
    "fmha_fp8",
    "fwd",
    FmhaFp8Args,
    package="tilewright.ops.attention",
    kernels=("sm90.fp8_forward", "triton.few_queries", "triton.fp8"),
    outputs=_outputs,
    reference=attention,
    bucket=bucket,
    bucket_names=FmhaFp8Bucket._fields,
    count=2,
    dtypes=(E4M3,),
)

CONTRACT = register(
    Contract(
        name="fmha_fp8",
        family="attention",
        summary="attention over float8 with scales of heads or of 128 tokens, forward",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        edge_grid={"H": lambda params: (4,) if params.get("mask") == "heads" else (1, 2, 3, 4, 6, 8)},
        bad_inputs=samples.BAD_INPUTS,
        dtypes=(E4M3,),
    )
)
