"""The experts of a mixture with biases, a clamped gate, gates beside ups, or transposed weights."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.ops.moe.fused_bias import samples
from tilewright.ops.moe.fused_bias.args import (
    FusedMoeBiasArgs,
    FusedMoeBiasBackwardArgs,
    FusedMoeBiasBucket,
    bias_bucket,
)
from tilewright.ops.moe.fused_bias.checks import check
from tilewright.ops.moe.fused_bias.reference import DIFFERENTIATED, experts, experts_backward


@dispatch("fused_moe_bias")
def fused_moe_bias(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "swigluoai",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`fused_moe` of experts as gpt-oss has them: y[t] = sum over j of topk_weights[t, j] * (D h + w2_bias[e]), where h
    is the gated form of x[t] w1[e]^T + w1_bias[e], e = topk_ids[t, j] and D = w2[e].

    x: (T, H)   w1: (E, 2 I, H)   w2: (E, H, I)   w1_bias: (E, 2 I)   w2_bias: (E, H)   bf16|fp16|fp32, one dtype.
    Weights may be views of (E, H, 2 I) and (E, I, H), as `.mT` of gpt-oss' parameters: both are read in place.
    activation: "swigluoai", which is (up + 1) * gate * sigmoid(alpha * gate) of gates clamped to at most limit and ups
    to -limit .. limit; "silu" and "gelu" as in `fused_moe`.   interleaved: whether rows 2 i of w1 are gates and rows
    2 i + 1 ups; else all gates come before all ups.   limit: above 0; inf clamps nothing.
    topk_weights, topk_ids, expert_map, out, backend: as in `fused_moe`.
    Returns (T, H) in x's dtype.   Products are summed in float32 and rounded to x's dtype before the biases; nothing is
    added atomically, so a result repeats bit for bit.
    Gradients of x, w1, w2, topk_weights and of the biases.  Of a forward nothing but its arguments is kept.  Where a
    gate or an up is beyond its limit, its gradient is 0.
    Raises InputError for other dtypes and shapes, and a limit that is not above 0.
    Source: GptOssExperts in transformers; vLLM's name of the activation.
    """
    args = FusedMoeBiasArgs(
        x, w1, w2, topk_weights, topk_ids, w1_bias, w2_bias, expert_map, activation, interleaved, alpha, limit
    )
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def reference(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "swigluoai",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The same in plain torch: sort, gather, two grouped products, scatter."""
    return experts(
        FusedMoeBiasArgs(
            x, w1, w2, topk_weights, topk_ids, w1_bias, w2_bias, expert_map, activation, interleaved, alpha, limit
        )
    )


FORWARD = RawOp(
    "fused_moe_bias",
    "fwd",
    FusedMoeBiasArgs,
    package="tilewright.ops.moe",
    kernels=("sm90.fused_moe_bias", "triton.fused_moe_bias"),
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=experts,
    bucket=bias_bucket,
    bucket_names=FusedMoeBiasBucket._fields,
    out=True,
)

BACKWARD = RawOp(
    "fused_moe_bias",
    "bwd",
    FusedMoeBiasBackwardArgs,
    package="tilewright.ops.moe",
    kernels=("triton.fused_moe_bias",),
    outputs=lambda args: tuple(
        (t.shape, t.dtype) if t is not None and needed else ((0,), args.x.dtype)
        for t, needed in (
            (args.x, args.need_dx),
            (args.w1, args.need_dw1),
            (args.w2, args.need_dw2),
            (args.topk_weights, True),
            (args.w1_bias, True),
            (args.w2_bias, True),
        )
    ),
    reference=experts_backward,
    bucket=bias_bucket,
    bucket_names=FusedMoeBiasBucket._fields,
    count=len(DIFFERENTIATED),
)


def _raw_args(
    grads: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], args: FusedMoeBiasArgs, needs: FusedMoeBiasArgs
) -> FusedMoeBiasBackwardArgs:
    flags = (bool(need) for need in (needs.x, needs.w1, needs.w2))
    return FusedMoeBiasBackwardArgs(grads[0], *saved, *tuple(args)[8:], *flags)  # type: ignore[arg-type]


CONTRACT = register(
    Contract(
        name="fused_moe_bias",
        family="moe",
        summary="experts with biases and a clamped gate: gather, two products, gate, weighted sum",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=DIFFERENTIATED,
            save=lambda args, outputs: tuple(args)[:8],
            raw_args=_raw_args,
            recomputes=False,
        ),
        # A routing weight has one gradient, a sum whose terms cancel: of the few dozen in a case the largest error of
        # one rounding is up to four times that of another
        other_gradients={"topk_weights": 5.0},
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
        edge_grid={"K": (1,)},
    )
)
