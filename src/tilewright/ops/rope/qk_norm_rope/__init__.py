"""RMS norms of queries and keys, head by head, then rotary embedding: one op, forward and backward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Gradient, RawOp, Sample, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops import rows
from tilewright.ops.norm import rms_norm
from tilewright.ops.rope.apply_rope.args import RopeBucket, by_token_spec, rope_bucket, rotated_specs
from tilewright.ops.rope.apply_rope.checks import check_rotation
from tilewright.ops.rope.apply_rope.reference import reference as rotate
from tilewright.ops.rope.qk_norm_rope.args import QkNormRopeArgs, QkNormRopeBackwardArgs
from tilewright.ops.rope.qk_norm_rope.samples import BAD_INPUTS, inputs
from tilewright.ops.rope.qk_norm_rope.workloads import CPU_WORKLOADS, EDGE_CASES, WORKLOADS


@dispatch("qk_norm_rope")
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(q', k') = apply_rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin), each head normalised by itself.

    q, k:      (B, H, S, D), (B, H_kv, S, D), or packed sequences (T, H, D), (T, H_kv, D); bf16|fp16|fp32; read with
               their strides, so transposed views of (B, S, H, D) and slices of one projection are not copied first.
    q_weight, k_weight: (D,), one of these dtypes for both.
    eps, offset, fp32_weight: as in `rms_norm`.  x / sqrt(mean(x^2) + eps) is rounded to q's dtype, then multiplied by
               the weight (Qwen3, GLM-4.5); fp32_weight=True rounds once; offset=1.0 multiplies by 1 + weight in float32
               (Gemma 3).
    cos, sin, positions, interleaved, rotary_dim: as in `apply_rope`; elements behind the rotated ones are normalised
               alone.  A position outside the table raises InputError on a CPU; on a GPU the rotated elements are NaN.
    Returns new tensors of the shapes of q and k, laid out as those of `apply_rope`, and of the dtype of `rms_norm`:
    promote(q, q_weight) by default, and q's with fp32_weight or an offset.

    Rounding: the points of `rms_norm`, then those of `apply_rope`.
    Gradients: q, k and both weights.  cos and sin must not require one.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes or dtypes other than these.
    Source: Henry et al., "Query-Key Normalization for Transformers", 2020; Su et al., "RoFormer: Enhanced Transformer
    with Rotary Position Embedding", 2021.
    """
    options = (eps, offset, True if offset != 0.0 else fp32_weight, interleaved, rotary_dim or 0)
    return call(CONTRACT, QkNormRopeArgs(q, k, q_weight, k_weight, cos, sin, positions, *options), backend)


def reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch: the references of `rms_norm` and `apply_rope`."""
    norm = partial(rms_norm.reference, eps=eps, offset=offset, fp32_weight=fp32_weight)
    normed = norm(q, q_weight), norm(k, k_weight)
    return rotate(*normed, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=rotary_dim)


def _raw(args: QkNormRopeArgs) -> tuple[Tensor, Tensor]:
    return reference(**args._asdict())


def _raw_backward(args: QkNormRopeBackwardArgs) -> tuple[Tensor, ...]:
    forward = args.forward()

    def raw(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        return _raw(forward._replace(q=q, k=k, q_weight=q_weight, k_weight=k_weight))

    dq, dk, *dweights = vjp(raw, forward[:4], (args.dyq, args.dyk))
    return dq, dk, *(dw if args.need_dweight else dw.new_empty(0) for dw in dweights)


def out_dtype(args: QkNormRopeArgs) -> torch.dtype:
    """Return the dtype of q' and k'."""
    return rms_norm.out_dtype(args.q, args.q_weight, args.fp32_weight)


def _gradient_specs(args: QkNormRopeBackwardArgs) -> tuple[OutputSpec, ...]:
    """Gradients of q and k are laid out by token: the backward of their projections reads them without a copy."""
    q, k, weight = args.q, args.k, args.q_weight
    n = weight.shape[0] if args.need_dweight else 0
    return by_token_spec(q, q.dtype), by_token_spec(k, k.dtype), ((n,), weight.dtype), ((n,), weight.dtype)


KERNELS = ("triton.qk_norm_rope",)

FORWARD = RawOp(
    "qk_norm_rope",
    "fwd",
    QkNormRopeArgs,
    package="tilewright.ops.rope",
    kernels=KERNELS,
    outputs=lambda args: rotated_specs(args.q, args.k, out_dtype(args)),
    reference=_raw,
    bucket=lambda args: rope_bucket(args.as_rotation()),
    bucket_names=RopeBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "qk_norm_rope",
    "bwd",
    QkNormRopeBackwardArgs,
    package="tilewright.ops.rope",
    kernels=KERNELS,
    outputs=_gradient_specs,
    reference=_raw_backward,
    bucket=lambda args: rope_bucket(args.as_rotation()),
    bucket_names=RopeBucket._fields,
    count=4,
)


def check(args: QkNormRopeArgs) -> None:
    """Raise InputError for what the docstring of `qk_norm_rope` excludes."""
    check_rotation("qk_norm_rope", args.as_rotation())
    rows.check_floating("qk_norm_rope", q=args.q, q_weight=args.q_weight, k_weight=args.k_weight)
    rows.check_vector("qk_norm_rope", args.q, q_weight=args.q_weight)
    rows.check_same("qk_norm_rope", q_weight=args.q_weight, k_weight=args.k_weight)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: QkNormRopeArgs, needs: QkNormRopeArgs
) -> QkNormRopeBackwardArgs:
    """Heads without a gradient, or of which none is needed, become tensors of no heads, which cost nothing."""
    no_heads = next(g for g in grads if g is not None).narrow(1, 0, 0)
    needed = (needs.q or needs.q_weight, needs.k or needs.k_weight)
    dys, heads = [], []
    for dy, x, need in zip(grads, saved[:2], needed, strict=True):
        absent = dy is None or not need
        dys.append(no_heads if absent else dy)
        heads.append(x.narrow(1, 0, 0) if absent else x)
    need_dweight = needs.q_weight or needs.k_weight
    return QkNormRopeBackwardArgs._make((*dys, *heads, *saved[2:], *args[7:], need_dweight))


def _gradients(grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Replace gradients of no heads, and of their weight, by None."""
    heads = [g.shape[1] for g in grads[:2]]
    return tuple(g if n else None for g, n in zip(grads, 2 * heads, strict=True))


def _empty_gradients(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: QkNormRopeArgs, needs: QkNormRopeArgs
) -> dict[str, Tensor]:
    """Gradients of a q or k that has no heads itself, and of its weight."""
    results: dict[str, Tensor] = {}
    for name, dy, x, weight in zip("qk", grads, saved[:2], saved[2:4], strict=True):
        if dy is not None and not dy.shape[1]:
            results |= {name: torch.empty_like(x)} if getattr(needs, name) else {}
            results |= {f"{name}_weight": torch.zeros_like(weight)} if getattr(needs, f"{name}_weight") else {}
    return results


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads q, k, the weights, every position and half of each row of the tables that is used; writes q' and
    k'.  Backward reads the gradients of these too, and writes those of q, k and the weights.
    """
    q, k, q_weight, k_weight, cos, _ = sample.args
    r = sample.kwargs.get("rotary_dim") or cos.shape[-1]
    positions = sample.kwargs.get("positions")
    table_rows = cos.numel() // cos.shape[-1]
    if positions is not None:
        table_rows = min(table_rows, positions.numel())
    heads, weights = rows.nbytes(q, k), rows.nbytes(q_weight, k_weight)
    elements = q.numel() + k.numel()
    pairs = elements // q.shape[-1] * (r // 2)
    out = (
        elements
        * rms_norm.out_dtype(
            q, q_weight, bool(sample.kwargs.get("fp32_weight") or sample.kwargs.get("offset"))
        ).itemsize
    )
    read = heads + weights + rows.nbytes(positions) + 2 * table_rows * (r // 2) * cos.element_size()
    if direction == "fwd":
        return Cost(4 * elements + 6 * pairs, read, out)
    return Cost(10 * elements + 6 * pairs, read + out, heads + weights)


CONTRACT = register(
    Contract(
        name="qk_norm_rope",
        family="rope",
        summary="RMS norms of queries and keys, and their rotary position embedding",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("q", "k", "q_weight", "k_weight"),
            save=lambda args, outputs: args[:7],
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
