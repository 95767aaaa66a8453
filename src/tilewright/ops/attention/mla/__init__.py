"""Multi-head latent attention for prefill and training, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.dispatch.raw import OutputSpec
from tilewright.mask import Mask
from tilewright.ops.attention.bucket import in_one_kernel, steps_of_float32
from tilewright.ops.attention.checks import check_layout
from tilewright.ops.attention.layout import dense, spec_like
from tilewright.ops.attention.mla import checks
from tilewright.ops.attention.mla.args import (
    MlaArgs,
    MlaBackwardArgs,
    MlaBucket,
    backward_bucket,
    bucket,
    forward_args,
)
from tilewright.ops.attention.mla.cost import cost
from tilewright.ops.attention.mla.reference import joined_attention, joined_attention_backward
from tilewright.ops.attention.mla.samples import BAD_INPUTS, EDGE_CASES, inputs
from tilewright.ops.attention.mla.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.rows import accumulate_dtype


@dispatch("mla")
def mla(
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "BHSD",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = softmax(s) v, s = scale * (q k^T + q_pe k_pe^T): keys share their rope part among all heads.

    q: (B, H, S_q, D)   q_pe: (B, H, S_q, D_pe)   k: (B, H, S_k, D)   k_pe: (B, 1, S_k, D_pe)   v: (B, H, S_k, D_v), or
    (B, S, H, D) each with layout="BSHD"; bf16|fp16|fp32, the same for all.  In DeepSeek-V2 and V3 D = D_v = 128 and
    D_pe = 64, with rope applied before this call.  Any strides; a last stride other than 1 costs a copy; so q and q_pe
    may be the two views of one projection, and k and v those of another.
    Returns o (B, H, S_q, D_v), which lies in memory as q does; with return_lse also lse (B, H, S_q) float32, the
    natural logarithm of the softmax's denominator.  scale: (D + D_pe)^-0.5 by default.

    causal: mask & causal().   mask: one of tilewright.mask, or several of them with & | ~.
    The position of query i is i + S_k - S_q: the last query sees the last key.  A query that may see nothing gets 0,
    and lse -inf.

    This is the form for prefill and training, with k and v made of the latent; in a decode step the projections are
    absorbed into q and o, and one head of latents is read.

    Scores, softmax and sums are float32; probabilities are rounded to v's dtype before the product with v.
    Gradients: of all five, also through lse; that of k_pe is the sum over heads, in float32.  They repeat bit for bit
    in all kernels of this library.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes and masks that do not go together.
    Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024.
    """
    check_layout("mla", layout)
    checks.check_dimensions(q, q_pe, k, k_pe, v)
    bshd = layout == "BSHD"
    if bshd:
        q, q_pe, k, k_pe, v = (t.transpose(1, 2) for t in (q, q_pe, k, k_pe, v))
    o, lse = call(CONTRACT, forward_args(q, q_pe, k, k_pe, v, causal, mask, scale), backend)
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def reference(
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "BHSD",
) -> Tensor | tuple[Tensor, Tensor]:
    """The same over concatenated tensors in plain torch; on a GPU, large problems that cuDNN takes are cuDNN's."""
    bshd = layout == "BSHD"
    if bshd:
        q, q_pe, k, k_pe, v = (t.transpose(1, 2) for t in (q, q_pe, k, k_pe, v))
    o, lse = joined_attention(forward_args(q, q_pe, k, k_pe, v, causal, mask, scale))
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _outputs(args: MlaArgs) -> tuple[OutputSpec, ...]:
    """o has the memory order of q; lse is (B, H, S_q) contiguous."""
    q = args.q
    return spec_like(q, args.v.shape[3]), (tuple(q.shape[:3]), accumulate_dtype(q.dtype))


def _gradients(args: MlaBackwardArgs) -> tuple[OutputSpec, ...]:
    """Each gradient has the memory order of its operand."""
    return tuple(spec_like(t, t.shape[3]) for t in (args.q, args.q_pe, args.k, args.k_pe, args.v))


def _save(args: MlaArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """All six tensors of the forward, then both results."""
    return (args.q, args.q_pe, args.k, args.k_pe, args.v, args.mask_data, *outputs)


def _raw_args(grads: tuple[Any, ...], saved: tuple[Any, ...], args: MlaArgs, needs: Any) -> MlaBackwardArgs:
    q, q_pe, k, k_pe, v, mask_data, o, lse = saved
    do, dlse = grads
    # Kernels take do in the operands' dtype with dense rows
    do = torch.zeros_like(o) if do is None else dense(do.to(o.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    mask = args.mask._replace(mask_data=mask_data)
    return MlaBackwardArgs(do, dlse, q, q_pe, k, k_pe, v, o, lse, *mask, args.scale)


def _torch_first(bucket: MlaBucket, dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes: where it has a fused kernel over joined tensors, but not
    before CUDA C++, which took 0.80 to 0.89 of cuDNN's time over tensors joined beforehand in ten rows on an H200.
    """
    sizes, width = (bucket.BH, bucket.S_q, bucket.S_k), bucket.D + bucket.D_pe
    if dtype.itemsize == 4:
        return steps_of_float32(bucket.mask, *sizes, width)
    return first != "cuda" and in_one_kernel(bucket.mask, *sizes, width, bucket.D_v)


_BACKWARD_KEYS = 8192
"""Keys up to which the backward in CUDA C++ is the guess."""


def _torch_first_backward(bucket: MlaBucket, dtype: torch.dtype, first: str) -> bool:
    """The same; the backward in CUDA C++ took 0.93 to 0.99 of cuDNN's time in five rows of 1024 to 8192 keys, 1.05 at
    16384.
    """
    longer = bucket.S_k > _BACKWARD_KEYS
    return _torch_first(bucket, dtype, first="triton" if first == "cuda" and longer else first)


FORWARD = RawOp(
    "mla",
    "fwd",
    MlaArgs,
    package="tilewright.ops.attention",
    kernels=("sm90.mla", "triton.mla"),
    outputs=_outputs,
    reference=joined_attention,
    bucket=bucket,
    bucket_names=MlaBucket._fields,
    count=2,
    torch_first=_torch_first,
)
BACKWARD = RawOp(
    "mla",
    "bwd",
    MlaBackwardArgs,
    package="tilewright.ops.attention",
    kernels=("sm90.mla_backward", "triton.mla"),
    outputs=_gradients,
    reference=joined_attention_backward,
    bucket=backward_bucket,
    bucket_names=MlaBucket._fields,
    count=5,
    torch_first=_torch_first_backward,
)

CONTRACT = register(
    Contract(
        name="mla",
        family="attention",
        summary="multi-head latent attention with its own product for rotated parts",
        reference=reference,
        forward=FORWARD,
        check=checks.check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("q", "q_pe", "k", "k_pe", "v"),
            save=_save,
            raw_args=_raw_args,
            recomputes=False,
        ),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        edge_grid={"H": lambda params: (4,) if params.get("mask") == "heads" else (1, 2, 3, 16, 17)},
        bad_inputs=BAD_INPUTS,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
)
