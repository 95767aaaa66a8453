"""Attention for training with dropout, whose mask is computed and never stored."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.mask import Mask
from tilewright.ops import philox
from tilewright.ops.attention import checks
from tilewright.ops.attention.arguments import merged, raw_arguments
from tilewright.ops.attention.fmha.cost import cost
from tilewright.ops.attention.fmha_dropout import samples
from tilewright.ops.attention.fmha_dropout.args import OP, FmhaDropoutArgs, check
from tilewright.ops.attention.fmha_dropout.raw_ops import FORWARD, GRADIENT
from tilewright.ops.attention.reference import attention
from tilewright.ops.attention.score import split


@dispatch(OP)
def fmha_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    *,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: str = "BHSD",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fmha` with dropout: o = (m * softmax(s)) v, where m is 0 with probability p, else 1 / (1 - p).

    q: (B, H, S_q, D)   k: (B, H_kv, S_k, D)   v: (B, H_kv, S_k, D_v), or (B, S, H, D) each with layout="BSHD";
    bf16|fp16|fp32; masks, modifiers, strides, layouts and results as in `fmha`.  lse is that before dropout, and a sink
    is not dropped.
    p: 0 to 1, rounded to a multiple of 2^-31; 0 keeps all, 1 none.

    m is a function of (seed, offset, batch, head, i, j) alone, of query i and key j as they stand in q and k: not of
    the backend, the GPU, tiles, the mask, lengths, the dtype, the order in memory or other rows of the batch.  Nothing
    is saved for the backward but seed and offset, and its gradients repeat bit for bit.
    seed, offset: int64 numbers, or () int64 tensors beside q, which are read there: a CUDA graph replays with what they
    hold then.  They must stay unchanged until the backward, or torch refuses it.  A number is first written to the
    device, a launch each.  Other offsets of a seed give independent masks: use one seed a model, and an offset for each
    layer and step.

    Philox 4x32-10 with key `seed` and counter (batch, head, offset), 64 bits of offset, gives a head words r0 to r3.
    With key (r0, r1) and counter (j & ~8, i & ~8, r2, r3) its word 2 * (i & 8 > 0) + (j & 8 > 0) drops the probability
    of i and j if it is below p * 2^32.
    A dropped probability is 0, times NaN in a value still NaN.

    Gradients: q, k, v and sinks; also through lse.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.  The kernels are `fmha`'s.
    Raises InputError for other dtypes, p outside 0 to 1, seeds that are no int64, score modifiers but softcap, alibi
    and sinks, masks of a foreign function.
    Source: Srivastava et al., "Dropout", 2014; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    checks.check_layout(OP, layout)
    checks.check_heads(OP, q, k, v)
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    args = _arguments(q, k, v, p, seed, offset, merged(OP, mask, causal), scale, score_mod, sinks, softcap)
    o, lse = call(CONTRACT, args, backend)
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    seed: Tensor | int,
    offset: Tensor | int,
    mask: Mask | None,
    scale: float | None,
    score_mod: Any,
    sinks: Tensor | None,
    softcap: float | None,
) -> FmhaDropoutArgs:
    """Those of the raw op, for q, k and v as (B, H, S, D)."""
    scores = split(OP, score_mod, softcap, sinks)
    if scores.rest or (mask is not None and mask.only_flex):
        raise InputError(f"{OP} has no score modifier but softcap, alibi and sinks, and no mask of a foreign function.")
    plain = raw_arguments(q, k, v, mask, scale, scores)
    seed, start = philox.on_device(OP, "seed", seed, q), philox.start_of(OP, offset, q)
    operands = plain.q, plain.k, plain.v, plain.sinks, plain.slopes, seed, start
    return FmhaDropoutArgs(*operands, *plain.mask, plain.scale, plain.softcap, p)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    *,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: str = "BHSD",
) -> Tensor | tuple[Tensor, Tensor]:
    """Plain torch, blocks of queries at a time; the same mask."""
    bshd = layout == "BSHD"
    if bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    args = _arguments(q, k, v, p, seed, offset, merged(OP, mask, causal), scale, score_mod, sinks, softcap)
    o, lse = attention(args.fmha, args.dropout)
    if bshd:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _row(name: str, **params: Any) -> Workload:
    return Workload(name, {**params, "p": 0.1}, (torch.bfloat16,), ("fwd", "bwd"))


CONTRACT = register(
    Contract(
        name=OP,
        family="attention",
        summary="attention with dropout of the probabilities, whose mask is a function of seed, offset and place",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=cost,
        gradient=GRADIENT,
        workloads=(
            _row("8x16x2048x128_causal", B=8, H=16, S=2048, D=128, causal=True),
            _row("8x16x2048x64_full", B=8, H=16, S=2048, D=64),
            _row("2x32/8x4096x128_causal", B=2, H=32, H_kv=8, S=4096, D=128, causal=True),
        ),
        cpu_workloads=(_row("1x4/2x256x64_causal", B=1, H=4, H_kv=2, S=256, D=64, causal=True),),
        edge_cases=samples.EDGE_CASES,
        edge_grid=samples.EDGE_GRID,
        bad_inputs=samples.BAD_INPUTS,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        batch_dim=None,  # the mask depends on the place in the batch
    )
)
