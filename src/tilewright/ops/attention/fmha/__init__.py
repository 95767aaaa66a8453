"""Attention for prefill and training: any mask, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.errors import InputError
from tilewright.mask import Mask
from tilewright.ops import philox
from tilewright.ops.attention import checks, torch_only
from tilewright.ops.attention.arguments import merged, raw_arguments
from tilewright.ops.attention.fmha import samples
from tilewright.ops.attention.fmha.cost import cost
from tilewright.ops.attention.fmha.raw_ops import raw_ops
from tilewright.ops.attention.fmha.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.attention.reference import attention
from tilewright.ops.attention.score import split


@dispatch("fmha")
def fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    offset: Tensor | int = 0,
    return_lse: bool = False,
    layout: str = "BHSD",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = softmax(s) v over the keys a query may see, s = scale * q k^T; and lse, the logarithm of its denominator.

    q: (B, H, S_q, D)   k: (B, H_kv, S_k, D)   v: (B, H_kv, S_k, D_v), or (B, S, H, D) each with layout="BSHD";
    bf16|fp16|fp32, the same for all.  Query head h reads key head h // (H / H_kv).  Any strides; a last
    stride other than 1 costs a copy.  Returns o (B, H, S_q, D_v) in the memory order of q; with return_lse also lse
    (B, H, S_q) float32, natural.  scale: D^-0.5 by default.

    mask: one of tilewright.mask, or several of them with & | ~.   causal: mask & causal().
    The position of query i is i + S_k - S_q: the last query sees the last key (bottom right, as FlashAttention).
    torch's is_causal is top left, which differs where S_q and S_k do.
    A query that may see nothing gets 0, and lse -inf (with a sink, lse is the sink).

    score_mod: a modifier of tilewright.ops.attention.score, or a tuple of them, applied in order: softcap and alibi are
    inside the kernels, relative_bias and callables (score, b, h, q_idx, kv_idx) -> score are torch's FlexAttention.
    softcap: first of all, s = softcap * tanh(s / softcap).   sinks: (H,), exp(sinks[h]) joins the denominator.
    dropout: of the probabilities; with a seed as `fmha_dropout`, which says what seed and offset are, by kernels of
    this library.  Without one by torch's scaled_dot_product_attention, from torch's generator; then with masks alone,
    and without lse.

    Scores, softmax and sums are float32; probabilities are rounded to v's dtype before the product with v.
    Up to 8 queries behind 1024 keys or more, as decoding has them, divide the keys among programs as in `fmha_decode`,
    under causal masks and windows of keys before a query; not under numerics("batch_invariant").
    NaN in a key that a query may not see does not reach it; in a value it may reach queries of the same tile.
    Gradients: q, k, v, sinks and the table of relative_bias; also through lse.  They repeat bit for bit in all kernels
    of this library.
    backend: run on exactly this backend ("cuda", "triton", "cutile", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes, masks and modifiers that do not go together.
    Source: Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024.
    """
    _check_seed(dropout, seed, offset)
    if dropout and seed is not None:
        from tilewright.ops.attention.fmha_dropout import fmha_dropout

        return fmha_dropout(
            q, k, v, dropout, seed=seed, offset=offset, mask=mask, causal=causal, scale=scale, score_mod=score_mod,
            sinks=sinks, softcap=softcap, return_lse=return_lse, layout=layout, backend=backend,
        )  # fmt: skip
    checks.check_layout("fmha", layout)
    checks.check_heads("fmha", q, k, v)
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    merged_mask, scores = merged("fmha", mask, causal), split("fmha", score_mod, softcap, sinks)
    if dropout or scores.rest or (merged_mask is not None and merged_mask.only_flex):
        o, lse = _torch_only(q, k, v, merged_mask, scale, scores, dropout, return_lse, backend)
    else:
        o, lse = call(CONTRACT, raw_arguments(q, k, v, merged_mask, scale, scores), backend)
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    offset: Tensor | int = 0,
    return_lse: bool = False,
    layout: str = "BHSD",
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch; on a GPU, large problems without score modifiers are cuDNN's or FLASH's."""
    _check_seed(dropout, seed, offset)
    if dropout and seed is not None:
        from tilewright.ops.attention.fmha_dropout import reference as with_seed

        return with_seed(
            q, k, v, dropout, seed=seed, offset=offset, mask=mask, causal=causal, scale=scale, score_mod=score_mod,
            sinks=sinks, softcap=softcap, return_lse=return_lse, layout=layout,
        )  # fmt: skip
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    merged_mask, scores = merged("fmha", mask, causal), split("fmha", score_mod, softcap, sinks)
    if dropout:
        o, lse = _torch_only(q, k, v, merged_mask, scale, scores, dropout, return_lse, None)
    elif scores.rest or (merged_mask is not None and merged_mask.only_flex):
        o, lse = torch_only.plain(q, k, v, merged_mask, scale, scores)
    else:
        o, lse = attention(raw_arguments(q, k, v, merged_mask, scale, scores))
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _check_seed(dropout: float, seed: Tensor | int | None, offset: Tensor | int) -> None:
    """Raise InputError for what is no seed or offset, and for an offset without a seed."""
    if seed is None and type(offset) is int and offset == 0:
        return
    if seed is not None:
        philox.as_number("fmha", "seed", seed)
    philox.as_number("fmha", "offset", offset)
    if dropout and seed is None:
        raise InputError("fmha: offset goes with a seed; dropout without one is torch's, from torch's generator.")


def _torch_only(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merged_mask: Mask | None,
    scale: float | None,
    scores: Any,
    dropout: float,
    return_lse: bool,
    backend: str | None,
) -> tuple[Tensor, Any]:
    """(o, lse) of calls that no raw op takes; lse is None under dropout."""
    checks.check_shapes("fmha", q, k, v)
    checks.check_dropout("fmha", dropout)
    if scale is not None:
        checks.check_scale("fmha", scale)
    if merged_mask is not None:
        merged_mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if dropout:
        torch_only.check_dropped("fmha", scores, return_lse)
        torch_only.check_backend("fmha", backend, "dropout")
        return torch_only.dropped(q, k, v, merged_mask, scale, dropout), None
    torch_only.check_backend(
        "fmha", backend, "score modifier but softcap, alibi and sinks, and no mask of a foreign function"
    )
    return torch_only.modified(q, k, v, merged_mask, scale, scores)


FORWARD, BACKWARD, GRADIENT = raw_ops(
    "fmha",
    kernels=("sm90.few_queries", "sm90.forward", "triton.few_queries", "triton.forward", "cutile.forward"),
    backward_kernels=("sm90.backward", "triton.backward", "cutile.backward"),
)

CONTRACT = register(
    Contract(
        name="fmha",
        family="attention",
        summary="attention with masks, score modifiers and grouped heads",
        reference=reference,
        forward=FORWARD,
        check=lambda args: checks.check_raw("fmha", args),
        inputs=samples.inputs,
        cost=cost,
        gradient=GRADIENT,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        edge_grid=samples.EDGE_GRID,
        bad_inputs=samples.BAD_INPUTS,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
)
