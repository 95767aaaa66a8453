"""Multi-head latent attention for prefill and training, forward and backward: the contract."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.mask import Mask
from tilewright.ops.attention.checks import check_layout
from tilewright.ops.attention.mla import checks
from tilewright.ops.attention.mla.arguments import raw_arguments
from tilewright.ops.attention.mla.cost import cost
from tilewright.ops.attention.mla.raw import FORWARD, GRADIENT
from tilewright.ops.attention.mla.raw import reference as attention
from tilewright.ops.attention.mla.samples import BAD_INPUTS, EDGE_CASES, inputs
from tilewright.ops.attention.mla.workloads import CPU_WORKLOADS, WORKLOADS


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
    o, lse = call(CONTRACT, raw_arguments(q, q_pe, k, k_pe, v, causal, mask, scale), backend)
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
    o, lse = attention(*raw_arguments(q, q_pe, k, k_pe, v, causal, mask, scale))
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


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
        gradient=GRADIENT,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        edge_grid={"H": lambda params: (4,) if params.get("mask") == "heads" else (1, 2, 3, 16, 17)},
        bad_inputs=BAD_INPUTS,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
)
