"""Rotary embedding of queries and keys, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Gradient, RawOp, Sample, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.rope.apply_rope.args import (
    ApplyRopeArgs,
    ApplyRopeBackwardArgs,
    RopeBucket,
    by_token_spec,
    rope_bucket,
    rotated_specs,
)
from tilewright.ops.rope.apply_rope.checks import check
from tilewright.ops.rope.apply_rope.reference import reference
from tilewright.ops.rope.apply_rope.samples import BAD_INPUTS, inputs
from tilewright.ops.rope.apply_rope.workloads import CPU_WORKLOADS, EDGE_CASES, WORKLOADS


@dispatch("apply_rope")
def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(q', k'): each pair (a, b) of the first R elements of a head becomes (a cos - b sin, b cos + a sin).

    q, k:      (B, H, S, D), (B, H_kv, S, D), or packed sequences (T, H, D), (T, H_kv, D); bf16|fp16|fp32; read with
               their strides, so the usual transposed view of (B, S, H, D) is not copied first.
    cos, sin:  one row a token, (B or 1, S, W) or packed (T, W); with positions a table (P, W).
    positions: (B or 1, S) or packed (T,), int32|int64: each token's row of the table.  A row outside the table raises
               InputError on a CPU.  On a GPU the check would need a synchronisation: the rotated elements are NaN.
    Returns new tensors of the shapes and dtype of q and k; elements R to D of a head are copied.  They are laid out by
    token, (B, S, H, D) in memory, or by head, as q is (as k is, if q has one head).

    The pairs, and the columns of their cos and sin:
      default           elements (i, i + R/2): Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX
      interleaved=True  elements (2i, 2i + 1): GLM, Helium, Ernie, Cohere, DeepSeek-V2.  DeepSeek-V3 orders the
                        result differently, first elements of all pairs before the second: x[..., 0::2], x[..., 1::2].
      W = R (default)   column i serves pair i and column i + R/2 repeats it, as Hugging Face's rotary modules make
                        them; either may be read.  Cohere repeats each column: pass cos[..., ::2], rotary_dim=W.
      W = R/2           column i serves pair i; needs rotary_dim=R (GPT-OSS)

    Rounding: products and sum are each rounded to promote(q, cos), the result to q's dtype, as in Hugging Face's
    `q * cos + rotate_half(q) * sin`.  So float32 tables mean float32 arithmetic (OLMo-2, Cohere, DeepSeek-V2).

    Gradients: q and k.  cos and sin must not require one.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for shapes or dtypes other than these.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    Tables: `tilewright.ops.rope.tables` for every rope_type of Hugging Face's models (default, linear, dynamic NTK,
    YaRN, longrope, llama3, proportional), whole or partial; `tilewright.ops.rope.axes` for M-RoPE, patches of images
    and positions of packed sequences.
    """
    return call(CONTRACT, ApplyRopeArgs(q, k, cos, sin, positions, interleaved, rotary_dim or 0), backend)


def _raw(args: ApplyRopeArgs) -> tuple[Tensor, Tensor]:
    return reference(
        args.q,
        args.k,
        args.cos,
        args.sin,
        interleaved=args.interleaved,
        positions=args.positions,
        rotary_dim=args.rotary_dim,
    )


def _raw_backward(args: ApplyRopeBackwardArgs) -> tuple[Tensor, ...]:
    # The rotation is linear in q and k: the gradient depends on their shapes, not on their values.
    rotation = args.as_rotation()
    return vjp(lambda q, k: _raw(rotation._replace(q=q, k=k)), (args.dq, args.dk), (args.dq, args.dk))


KERNELS = ("triton.rope", "cutile.rope", "cpu.rope")

FORWARD = RawOp(
    "apply_rope",
    "fwd",
    ApplyRopeArgs,
    package="tilewright.ops.rope",
    kernels=KERNELS,
    outputs=lambda args: rotated_specs(args.q, args.k, args.q.dtype),
    reference=_raw,
    bucket=rope_bucket,
    bucket_names=RopeBucket._fields,
    count=2,
)
# Gradients are laid out by token: the backward of the projections of q and k reads them without a copy.
BACKWARD = RawOp(
    "apply_rope",
    "bwd",
    ApplyRopeBackwardArgs,
    package="tilewright.ops.rope",
    kernels=KERNELS,
    outputs=lambda args: (by_token_spec(args.dq, args.dq.dtype), by_token_spec(args.dk, args.dk.dtype)),
    reference=_raw_backward,
    bucket=lambda args: rope_bucket(args.as_rotation()),
    bucket_names=RopeBucket._fields,
    count=2,
)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: ApplyRopeArgs, needs: ApplyRopeArgs
) -> ApplyRopeBackwardArgs:
    """An absent gradient, or one that is not needed, becomes a tensor of no heads, which costs nothing."""
    no_heads = next(g for g in grads if g is not None).narrow(1, 0, 0)
    dq, dk = (g if g is not None and need else no_heads for g, need in zip(grads, (needs.q, needs.k), strict=True))
    cos, sin, positions = saved
    return ApplyRopeBackwardArgs(dq, dk, cos, sin, positions, args.interleaved, args.rotary_dim)


def _gradients(grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Replace a gradient of no heads by None."""
    return tuple(g if g.shape[1] else None for g in grads)


def _empty_gradients(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: ApplyRopeArgs, needs: ApplyRopeArgs
) -> dict[str, Tensor]:
    """Gradients of a q or k that has no heads itself."""
    tensors = zip(("q", "k"), grads, (needs.q, needs.k), strict=True)
    return {name: torch.empty_like(g) for name, g, need in tensors if g is not None and need and not g.shape[1]}


def cost(sample: Sample, direction: str) -> Cost:
    """Reads q and k, every position, and half of each row of the tables that is used; writes q' and k'."""
    q, k, cos, _ = sample.args
    r = sample.kwargs.get("rotary_dim") or cos.shape[-1]
    positions = sample.kwargs.get("positions")
    table_rows = cos.numel() // cos.shape[-1]
    if positions is not None:
        table_rows = min(table_rows, positions.numel())
    qk_bytes = rows.nbytes(q, k)
    pairs = (q.numel() + k.numel()) // q.shape[-1] * (r // 2)
    return Cost(6 * pairs, qk_bytes + rows.nbytes(positions) + 2 * table_rows * (r // 2) * cos.element_size(), qk_bytes)


CONTRACT = register(
    Contract(
        name="apply_rope",
        family="rope",
        summary="rotary position embedding of queries and keys",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("q", "k"),
            save=lambda args, outputs: (args.cos, args.sin, args.positions),
            raw_args=_backward_args,
            expand=_gradients,
            others=_empty_gradients,
        ),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=BAD_INPUTS,
    )
)
