"""The experts of a mixture: two products with each expert's weights, a gate between them, and their weighted sum."""

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.moe.fused import samples
from tilewright.ops.moe.fused.args import FusedMoeArgs, FusedMoeBackwardArgs, FusedMoeBucket, fused_bucket
from tilewright.ops.moe.fused.checks import check, scales_of
from tilewright.ops.moe.fused.extras import SharedExperts, check_shared, has_bias_form, shared_reference, with_shared
from tilewright.ops.moe.fused.reference import experts, experts_backward
from tilewright.ops.moe.fused_moe_bias import fused_moe_bias
from tilewright.ops.moe.fused_moe_bias import reference as bias_reference
from tilewright.ops.moe.fused_moe_fp8 import fused_moe_fp8
from tilewright.ops.moe.fused_moe_fp8 import reference as fp8_reference


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
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    shared_experts: SharedExperts | tuple[Tensor, ...] | None = None,
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
    Gradients of x, w1, w2 and topk_weights.  Of a forward nothing but its arguments is kept: the backward computes the
    first product again.
    quant: None, or "fp8_block": w1 and w2 are float8_e4m3fn with scales w1_scale and w2_scale of 128 x 128 blocks, and
    the rest is `fused_moe_fp8`, with "silu" alone and without gradients.
    w1_bias: (E, 2 I), w2_bias: (E, H), interleaved, and activation "swigluoai" with its alpha and limit: the rest is
    `fused_moe_bias`, the form of gpt-oss.
    shared_experts: (w1 (2 I_s, H), w2 (H, I_s)) or with a gate (1, H) as third: an MLP of every token, with the same
    activation, whose output, times sigmoid(x gate^T) if there is a gate, is added.  It consists of `matmul`,
    `silu_and_mul` or `gelu_and_mul`, and torch's sum; backend= speaks of the experts alone.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and for shapes that do not fit; ids are looked at as in `moe_align`.
    """
    if shared_experts is not None:
        check_shared(x, shared_experts, activation)
        routed = fused_moe(
            x, w1, w2, topk_weights, topk_ids, activation=activation, expert_map=expert_map, quant=quant,
            w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias, interleaved=interleaved,
            alpha=alpha, limit=limit, backend=backend,
        )  # fmt: skip
        return with_shared(routed, x, SharedExperts(*shared_experts), activation, out)
    if has_bias_form(activation, interleaved, alpha, limit, w1_bias, w2_bias):
        if quant is not None:
            raise InputError(f"fused_moe: quant is {quant!r}; experts with biases or a clamped gate need None.")
        return fused_moe_bias(
            x, w1, w2, topk_weights, topk_ids, w1_bias=w1_bias, w2_bias=w2_bias, expert_map=expert_map,
            activation=activation, interleaved=interleaved, alpha=alpha, limit=limit, out=out, backend=backend,
        )  # fmt: skip
    scales = scales_of(quant, activation, w1_scale, w2_scale)
    if scales is not None:
        return fused_moe_fp8(
            x, w1, w2, *scales, topk_weights, topk_ids, expert_map=expert_map, out=out, backend=backend
        )
    args = FusedMoeArgs(x, w1, w2, topk_weights, topk_ids, expert_map, activation)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


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
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    shared_experts: SharedExperts | tuple[Tensor, ...] | None = None,
) -> Tensor:
    """The same in plain torch: sort, gather, two grouped products, scatter."""
    scales = scales_of(quant, activation, w1_scale, w2_scale)
    if scales is not None:
        y = fp8_reference(x, w1, w2, *scales, topk_weights, topk_ids, expert_map=expert_map)
    elif has_bias_form(activation, interleaved, alpha, limit, w1_bias, w2_bias):
        y = bias_reference(
            x, w1, w2, topk_weights, topk_ids, w1_bias=w1_bias, w2_bias=w2_bias, expert_map=expert_map,
            activation=activation, interleaved=interleaved, alpha=alpha, limit=limit,
        )  # fmt: skip
    else:
        y = experts(FusedMoeArgs(x, w1, w2, topk_weights, topk_ids, expert_map, activation))
    return y if shared_experts is None else y + shared_reference(x, SharedExperts(*shared_experts), activation)


KERNELS = ("sm90.fused_moe", "triton.fused_moe")

FORWARD = RawOp(
    "fused_moe",
    "fwd",
    FusedMoeArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=experts,
    bucket=fused_bucket,
    bucket_names=FusedMoeBucket._fields,
    out=True,
)


BACKWARD = RawOp(
    "fused_moe",
    "bwd",
    FusedMoeBackwardArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=lambda args: tuple(
        (t.shape if needed else (0,), t.dtype)
        for t, needed in (
            (args.x, args.need_dx),
            (args.w1, args.need_dw1),
            (args.w2, args.need_dw2),
            (args.topk_weights, args.need_dweights),
        )
    ),
    reference=experts_backward,
    bucket=fused_bucket,
    bucket_names=FusedMoeBucket._fields,
    count=4,
)


def _raw_args(
    grads: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], args: FusedMoeArgs, needs: FusedMoeArgs
) -> FusedMoeBackwardArgs:
    flags = needs.x, needs.w1, needs.w2, needs.topk_weights
    return FusedMoeBackwardArgs(grads[0], *saved, args.activation, *(bool(need) for need in flags))  # type: ignore[call-arg, arg-type]


CONTRACT = register(
    Contract(
        name="fused_moe",
        family="moe",
        summary="the experts of a mixture: gather, two products, gate, weighted sum",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "w1", "w2", "topk_weights"),
            save=lambda args, outputs: tuple(args)[:6],
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
