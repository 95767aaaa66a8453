"""The experts of a mixture: two products with each expert's weights, a gate between them, and their weighted sum."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.activation.gelu_and_mul import gelu_and_mul
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.moe.fused import samples
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBucket, fused_bucket
from tilewright.ops.moe.fused.checks import check
from tilewright.ops.moe.fused.reference import experts
from tilewright.ops.moe.moe_align import moe_align
from tilewright.ops.moe.moe_permute import moe_permute
from tilewright.ops.moe.moe_unpermute import moe_unpermute


@dispatch("fused_moe")
def fused_moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    quant: str | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y[t] = sum over j of topk_weights[t, j] * (act(x[t] G^T) * (x[t] U^T)) D^T, with G and U the halves of
    w1[topk_ids[t, j]] and D = w2[topk_ids[t, j]]: no token is dropped, whatever experts it has.

    x: (T, H)   w1: (E, 2 I, H), gates first   w2: (E, H, I)   bf16|fp16|fp32, one dtype.
    topk_weights: (T, k) bf16|fp16|fp32 and topk_ids: (T, k) int32|int64, as `topk_softmax` gives them; an id of -1 adds
    nothing, and an expert given twice adds twice.   expert_map: (all experts,) int32, as in `moe_align`: experts of
    other devices add nothing here.   activation: "silu", or "gelu" in its tanh form.
    Returns (T, H) in x's dtype.   Products are summed in float32; the gated rows and those of the second product are
    rounded to x's dtype, the weighted sum is made in float32, the first expert's first.  Nothing is added atomically:
    a result repeats bit for bit.  Ids stay on the device, so a call can be captured, and replayed with others.
    Gradients of x, w1, w2 and topk_weights: the same by `moe_permute`, `grouped_matmul`, the gate and `moe_unpermute`.
    quant: None; low bits are no part of this version.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and for shapes that do not fit; ids are looked at as in `moe_align`.
    """
    if quant is not None:
        raise InputError(f"fused_moe: quant is {quant!r}; only None is supported: weights in the dtype of x.")
    args = FusedMoeArgs(x, w1, w2, topk_weights, topk_ids, expert_map, activation)
    tensors = (x, w1, w2, topk_weights)
    if out is None and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        with torch.no_grad():
            CONTRACT.check(*args)
        return _in_parts(args, backend)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def _in_parts(args: FusedMoeArgs, backend: str | None) -> Tensor:
    """The same by ops that have gradients."""
    x, w1, w2, weights, ids, expert_map, activation = args
    gate = silu_and_mul if activation == "silu" else gelu_and_mul
    # `cuda` has no kernel of its own for the steps around the products
    step = "triton" if backend == "cuda" else backend
    slots, positions, _, ends = moe_align(ids, w1.shape[0], expert_map=expert_map, backend=step)
    gathered = moe_permute(x, slots, positions, backend=step)
    hidden = gate(grouped_matmul(gathered, w1, ends, trans_b=True, backend=backend), backend=step)
    y = grouped_matmul(hidden, w2, ends, trans_b=True, backend=backend)
    return moe_unpermute(y, weights, slots, positions, backend=step)


def reference(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    quant: str | None = None,
) -> Tensor:
    """The same in plain torch: sort, gather, two grouped products, scatter."""
    return experts(FusedMoeArgs(x, w1, w2, topk_weights, topk_ids, expert_map, activation))


FORWARD = RawOp(
    "fused_moe",
    "fwd",
    FusedMoeArgs,
    package="tilewright.ops.moe",
    kernels=("sm90.fused_moe", "triton.fused_moe"),
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=experts,
    bucket=fused_bucket,
    bucket_names=FusedMoeBucket._fields,
    out=True,
)


def _contract(**parts: Any) -> Contract:
    return register(
        Contract(
            name="fused_moe",
            family="moe",
            summary="the experts of a mixture: gather, two products, gate, weighted sum",
            reference=reference,
            forward=FORWARD,
            check=check,
            inputs=samples.inputs,
            cost=samples.cost,
            workloads=samples.WORKLOADS,
            cpu_workloads=samples.CPU_WORKLOADS,
            edge_cases=samples.EDGE_CASES,
            bad_inputs=samples.BAD_INPUTS,
            edge_grid={"K": (1,)},
            **parts,
        )
    )


CONTRACT = _contract()
