"""The experts of a mixture in float8: weights with scales of blocks, rows cast before each product."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.ops.moe.fused_fp8 import samples
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, FusedMoeFp8Bucket, fp8_bucket
from tilewright.ops.moe.fused_fp8.checks import check
from tilewright.ops.moe.fused_fp8.reference import experts


@dispatch("fused_moe_fp8")
def fused_moe_fp8(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`fused_moe` of float8 weights: y[t] = sum over j of topk_weights[t, j] * D q(silu(G q(x[t])) * (U q(x[t]))),
    where q casts to float8_e4m3fn with a scale for each 128 neighbours of a row, as `per_token_cast_to_fp8` does.

    x: (T, H) bf16|fp16.   w1: (E, 2 I, H), gates first, and w2: (E, H, I) float8_e4m3fn.   w1_scale: (E, ceil(2 I/128),
    ceil(H/128)) and w2_scale: (E, ceil(H/128), ceil(I/128)) float32, one for each 128 x 128 block, as
    `per_block_cast_to_fp8` gives them and DeepSeek-V3's checkpoints have them.
    topk_weights, topk_ids, expert_map: as in `fused_moe`.
    Returns (T, H) in x's dtype.   Products are summed in float32 and rounded to x's dtype, and so are gated rows before
    their cast.  Nothing is added atomically: a result repeats bit for bit.
    out: where to write y.
    backend: run on exactly this backend ("cuda", "torch") or raise BackendError.   There is no gradient.
    Raises InputError for other dtypes, for shapes that do not fit, and where a gradient is wanted.
    """
    args = FusedMoeFp8Args(x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, expert_map)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def reference(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """The same in plain torch; of float64 arguments nothing is rounded."""
    return experts(FusedMoeFp8Args(x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, expert_map))


FORWARD = RawOp(
    "fused_moe_fp8",
    "fwd",
    FusedMoeFp8Args,
    package="tilewright.ops.moe",
    kernels=("sm90.fused_moe_fp8",),
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=experts,
    bucket=fp8_bucket,
    bucket_names=FusedMoeFp8Bucket._fields,
    dtypes=(torch.bfloat16, torch.float16),
    out=True,
)

CONTRACT = register(
    Contract(
        name="fused_moe_fp8",
        family="moe",
        summary="the experts of a mixture in float8: cast and gather, two products, gate and cast, weighted sum",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
        dtypes=(torch.bfloat16, torch.float16),
        edge_grid={"K": (1,)},
    )
)
