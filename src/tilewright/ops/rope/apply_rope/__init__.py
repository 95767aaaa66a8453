"""Rotary embedding of queries and keys, forward and backward.  The contract; backends are the files next to it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.derivatives import vjp
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops import rows
from tilewright.ops.rope.apply_rope.checks import check
from tilewright.ops.rope.apply_rope.samples import BAD_INPUTS, inputs


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
    Tables: `tilewright.ops.rope.tables`.
    """
    return call(CONTRACT, (q, k, cos, sin, positions, interleaved, rotary_dim or 0), backend)


def reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch; equals the Hugging Face functions bit for bit."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = (_expand_table(t, rotary_dim or t.shape[-1], interleaved).unsqueeze(1) for t in (cos, sin))
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _expand_table(table: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """(..., W) -> (..., R): one column for each element instead of each pair."""
    if interleaved:
        return table[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)
    return table if table.shape[-1] == rotary_dim else torch.cat((table, table), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r = cos.shape[-1]
    rotary, tail = x[..., :r], x[..., r:]
    if interleaved:
        rotated_half = torch.stack((-rotary[..., 1::2], rotary[..., 0::2]), dim=-1).flatten(-2)
    else:
        rotated_half = torch.cat((-rotary[..., r // 2 :], rotary[..., : r // 2]), dim=-1)
    rotated = (rotary * cos + rotated_half * sin).to(x.dtype)
    return torch.cat((rotated, tail), dim=-1) if r < x.shape[-1] else rotated


def _raw(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, rotary_dim: int
) -> tuple[Tensor, Tensor]:
    return reference(q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=rotary_dim)


def _raw_backward(dq: Tensor, dk: Tensor, *tables_and_options: Any) -> tuple[Tensor, ...]:
    # The rotation is linear in q and k: the gradient depends on their shapes, not on their values.
    return vjp(lambda q, k: _raw(q, k, *tables_and_options), (dq, dk), (dq, dk))


def by_token(*tensors: Tensor) -> bool:
    """True if these (B, H, S, D) tensors are (B, S, H, D) in memory, as a projection writes them.

    The stride of a single head says nothing: the first tensor with several heads decides.
    """
    return next((bool(x.stride(1) < x.stride(2)) for x in tensors if x.dim() == 4 and x.shape[1] > 1), False)


def _by_token_spec(x: Tensor) -> OutputSpec:
    """Shape and dtype of `x`, laid out by token; packed tensors already are."""
    if x.dim() == 3:
        return x.shape, x.dtype
    b, h, s, d = x.shape
    return (b, h, s, d), x.dtype, (s * h * d, d, h * d, 1)


def _outputs(q: Tensor, k: Tensor, *_: Any) -> tuple[OutputSpec, ...]:
    """Laid out by token if q is (k, if q has one head): the projection after attention then needs no copy."""
    if by_token(q, k):
        return _by_token_spec(q), _by_token_spec(k)
    return (q.shape, q.dtype), (k.shape, k.dtype)


def tokens_bucket(q: Tensor, k: Tensor, cos: Tensor, *rest: Any) -> tuple[int, ...]:
    """(tokens rounded up to a power of two, H, H_kv, D, R)."""
    tokens = q.shape[0] * q.shape[2] if q.dim() == 4 else q.shape[0]
    r = rest[-1] or hint(cos.shape[-1])
    return row_bucket(tokens), hint(q.shape[1]), hint(k.shape[1]), hint(q.shape[-1]), r


_BUCKET = ("T", "H", "H_kv", "D", "R")
_TABLE_SCHEMA = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved, int rotary_dim"
FORWARD = RawOp(
    "apply_rope",
    "fwd",
    f"Tensor q, Tensor k, {_TABLE_SCHEMA}",
    package=__name__,
    outputs=_outputs,
    reference=_raw,
    bucket=tokens_bucket,
    bucket_names=_BUCKET,
    count=2,
)
# Gradients are laid out by token: the backward of the projections of q and k reads them without a copy.
BACKWARD = RawOp(
    "apply_rope",
    "bwd",
    f"Tensor dq, Tensor dk, {_TABLE_SCHEMA}",
    package=__name__,
    outputs=lambda dq, dk, *_: (_by_token_spec(dq), _by_token_spec(dk)),
    reference=_raw_backward,
    bucket=tokens_bucket,
    bucket_names=_BUCKET,
    count=2,
)


def _backward_args(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    """An absent gradient, or one that is not needed, becomes a tensor of no heads, which costs nothing."""
    no_heads = next(g for g in grads if g is not None).narrow(1, 0, 0)
    dq, dk = (g if g is not None and need else no_heads for g, need in zip(grads, needs[:2], strict=True))
    return (dq, dk, *saved, *args[5:])


def _gradients(grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Replace a gradient of no heads by None."""
    return tuple(g if g.shape[1] else None for g in grads)


def _empty_gradients(
    grads: tuple[Any, ...], saved: tuple[Any, ...], args: Sequence[Any], needs: Sequence[bool]
) -> dict[int, Tensor]:
    """Gradients of a q or k that has no heads itself."""
    return {i: torch.empty_like(g) for i, g in enumerate(grads) if g is not None and needs[i] and not g.shape[1]}


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


_LLAMA_8B = {"H": 32, "H_kv": 8, "D": 128}
_SMALL = {"B": 2, "S": 5, "H": 4, "H_kv": 2, "D": 64}
_PACKED = {"T": 23, "H": 4, "H_kv": 2, "D": 64}
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
            inputs=(0, 1),
            save=lambda args, outputs: (args[2], args[3], args[4]),
            raw_args=_backward_args,
            expand=_gradients,
            others=_empty_gradients,
        ),
        workloads=(
            Workload("llama8b_1x8k", {"B": 1, "S": 8192, **_LLAMA_8B}),
            Workload("llama8b_4x2k", {"B": 4, "S": 2048, **_LLAMA_8B}),
            Workload("llama8b_packed", {"T": 8192, "positions": 8200, **_LLAMA_8B}),
            Workload("qwen7b_4x2k", {"B": 4, "S": 2048, "H": 28, "H_kv": 4, "D": 128}),
            Workload("llama1b_4x2k", {"B": 4, "S": 2048, "H": 32, "H_kv": 8, "D": 64}),
            Workload("llama1b_1x512", {"B": 1, "S": 512, "H": 32, "H_kv": 8, "D": 64}),
            Workload("phi2_1x256", {"B": 1, "S": 256, "H": 32, "H_kv": 32, "D": 80, "R": 32}),
            Workload("phi2_4x2k", {"B": 4, "S": 2048, "H": 32, "H_kv": 32, "D": 80, "R": 32}),
            Workload("glm9b_1x8k", {"B": 1, "S": 8192, "H": 32, "H_kv": 2, "D": 128, "R": 64, "interleaved": True}),
            *(Workload(f"decode_{b}", {"B": b, "S": 1, **_LLAMA_8B}, directions=("fwd",)) for b in (1, 16, 64)),
        ),
        cpu_workloads=(
            Workload("small", {"B": 1, "S": 512, "H": 8, "H_kv": 2, "D": 64}, (torch.bfloat16, torch.float32)),
        ),
        edge_cases=(
            Workload("decode: one token", {**_SMALL, "B": 1, "S": 1}),
            Workload("decode_batch: all tokens in the batch", {**_SMALL, "B": 5, "S": 1, "tables": "each"}),
            Workload("odd_s: the last tokens are masked", {**_SMALL, "S": 13, "D": 32}),
            Workload("odd_heads: the last heads are masked", {**_SMALL, "H": 11, "H_kv": 3, "D": 32}),
            Workload("mqa: one key head", {**_SMALL, "H": 6, "H_kv": 1}),
            Workload(
                "one_head: its stride does not tell the layout of k", {**_SMALL, "H": 1, "H_kv": 3, "layout": "fused"}
            ),
            Workload("contiguous: by head, not by token", {**_SMALL, "layout": "contiguous"}),
            Workload("fused: slices of one projection", {**_SMALL, "layout": "fused"}),
            Workload("own_tables: each sequence its own", {**_SMALL, "tables": "each"}),
            Workload("d_80: halves are no power of two", {**_SMALL, "D": 80}),
            Workload("d_96: the same, three quarters full", {**_SMALL, "D": 96}),
            Workload("partial: the rest is copied", {**_SMALL, "D": 80, "R": 32}),
            Workload("r_10: halves are not aligned", {**_SMALL, "D": 16, "R": 10}),
            Workload("r_2: a single pair", {**_SMALL, "D": 8, "R": 2}),
            Workload("interleaved: pairs are neighbours", {**_SMALL, "interleaved": True}),
            Workload("interleaved_partial: with a rest", {**_SMALL, "D": 48, "R": 24, "interleaved": True}),
            Workload("half_tables: one column a pair", {**_SMALL, "tables": "half"}),
            Workload("float32_tables: float32 arithmetic", {**_SMALL, "table_dtype": torch.float32}),
            Workload(
                "cohere: every second column of float32 tables",
                {**_SMALL, "tables": "doubled", "interleaved": True, "table_dtype": torch.float32},
            ),
            Workload("positions: rows of a table", {**_SMALL, "positions": 37}),
            Workload("packed: sequences end to end", {**_PACKED, "positions": 37}),
            Workload("packed_rows: a row a token", {**_PACKED, "R": 32}),
            Workload("empty: no sequences", {**_SMALL, "B": 0}),
        ),
        bad_inputs=BAD_INPUTS,
    )
)
