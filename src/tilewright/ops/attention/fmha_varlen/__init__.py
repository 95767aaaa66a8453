"""Attention over sequences of any lengths, packed end to end."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.mask import Mask, sequences
from tilewright.ops.attention import torch_only
from tilewright.ops.attention.arguments import MaskArgs, VarlenArgs, raw_arguments
from tilewright.ops.attention.bucket import VarlenBucket, varlen_bucket
from tilewright.ops.attention.checks import check_raw, check_scale, check_shapes
from tilewright.ops.attention.fmha.raw_ops import Forward, raw_ops
from tilewright.ops.attention.fmha_varlen import samples
from tilewright.ops.attention.fmha_varlen.checks import OP, check_distances, check_tokens
from tilewright.ops.attention.fmha_varlen.cost import cost
from tilewright.ops.attention.fmha_varlen.reference import Operands, band, by_head, one_by_one
from tilewright.ops.attention.fmha_varlen.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.attention.reference import attention
from tilewright.ops.attention.score import Scores, split


@dispatch("fmha_varlen")
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fmha` of many sequences at once: tokens of sequence n see only sequence n.

    q: (T_q, H, D)   k: (T_k, H_kv, D)   v: (T_k, H_kv, D_v)   bf16|fp16|fp32, the same for all; strides, heads and
    scale as in `fmha`.   cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 beside q, from 0, never decreasing, at most
    T: where each sequence begins.  The keys' are the queries' by default, and then T_k = T_q.  Sequences may be empty
    on either side.  Returns o (T_q, H, D_v); with return_lse also lse (H, T_q) float32, natural.

    The numbers in cu_seqlens stay on the device: nothing waits for them, so there is no max_seqlen, one CUDA graph
    serves all lengths of T_q and T_k tokens, and torch.compile sees one graph.
    Tokens after the last sequence: o = 0, lse = -inf (with a sink, lse is the sink), gradients 0.  So for queries that
    see nothing.  k may hold NaN there, and q in a forward; v must be finite, and for gradients all three and what
    arrives for o.

    causal, window: within each sequence, whose last query sees its last key (bottom right).   window: (left, right)
    keys around that position, None for no limit on a side.
    score_mod, sinks, softcap: as in `fmha`; a callable gets places of packed tokens as q_idx and kv_idx; alibi and
    relative_bias need one cu_seqlens for both.
    This is fmha under `mask.sequences(...)`, made in every call: on a GPU by one small launch, two from 1025 tokens on.
    Layers that share their sequences make it once:
    `fmha(q[None], k[None], v[None], mask=made, layout="BSHD")`.

    Where sequences have one query or a few, and 1024 keys or more together, keys are divided among programs as in
    `fmha_decode`; not under numerics("batch_invariant").

    Gradients: q, k, v, sinks and the table of relative_bias; also through lse.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes and options that do not go together.
    """
    check_tokens(q, k, v, cu_seqlens_q, cu_seqlens_k)
    scores = split(OP, score_mod, softcap, sinks)
    check_distances(scores, cu_seqlens_k)
    mask = sequences(cu_seqlens_q, cu_seqlens_k, length_q=q.shape[0], length_k=k.shape[0], causal=causal, window=window)
    heads = by_head(q, k, v)
    if scores.rest:
        o, lse = _torch_only(heads, mask, scale, scores, backend)
    else:
        o, lse = call(CONTRACT, _arguments(heads, mask, scale, scores, cu_seqlens_q.shape[0] - 1), backend)
    o = o[0].transpose(0, 1)
    return (o, lse[0]) if return_lse else o


def _arguments(heads: Operands, mask: Mask, scale: float | None, scores: Scores, count: int) -> VarlenArgs:
    """Those of the raw op, for `count` sequences.

    The program is made where the tensors are, which may be nowhere (meta, fake).
    """
    plain = raw_arguments(*heads, None, scale, scores)
    program, data = mask.program(heads[0].device)
    packed = MaskArgs(data, program, -1, -1)
    return VarlenArgs(*plain._replace(**packed._asdict()), count)


def _torch_only(
    heads: Operands, mask: Mask, scale: float | None, scores: Scores, backend: str | None
) -> tuple[Tensor, Tensor]:
    """What no raw op has."""
    check_shapes(OP, *heads)
    if scale is not None:
        check_scale(OP, scale)
    torch_only.check_backend(OP, backend, "score modifier but softcap, alibi and sinks")
    return torch_only.modified(*heads, mask, scale, scores)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch, sequence by sequence; it reads cu_seqlens, and so waits for a GPU."""
    scores = split(OP, score_mod, softcap, sinks)
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    o, lse = one_by_one(q, k, v, cu_seqlens_q, cu_k, band(causal, window), scale, scores)
    return (o, lse) if return_lse else o


def _attention(args: VarlenArgs) -> tuple[Tensor, Tensor]:
    """The raw op's reference: one attention under the mask."""
    return attention(args.fmha)


FORWARD, BACKWARD, GRADIENT = raw_ops(
    OP,
    kernels=("sm90.few_queries", "sm90.forward", "triton.few_queries", "triton.forward"),
    backward_kernels=("sm90.backward", "triton.backward"),
    form=Forward(VarlenArgs, _attention, varlen_bucket, VarlenBucket._fields),
)

CONTRACT = register(
    Contract(
        name=OP,
        family="attention",
        summary="attention over packed sequences of any lengths",
        reference=reference,
        forward=FORWARD,
        check=lambda args: check_raw(OP, args),
        inputs=samples.inputs,
        cost=cost,
        gradient=GRADIENT,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        edge_grid=samples.EDGE_GRID,
        bad_inputs=samples.BAD_INPUTS,
        batch_dim=None,
    )
)
