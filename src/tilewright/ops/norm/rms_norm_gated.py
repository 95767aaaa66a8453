"""RMSNorm with a gate, of Mamba-2 and gated linear attention, forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows


class RmsNormGatedArgs(NamedTuple):
    x: Tensor  # (..., N)
    gate: Tensor  # (..., N)
    weight: Tensor  # (N,)
    eps: float
    norm_before_gate: bool
    group_size: int  # 0: N
    fp32_weight: bool
    activation: str


class RmsNormGatedBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    x: Tensor  # (..., N)
    gate: Tensor  # (..., N)
    weight: Tensor  # (N,)
    eps: float
    norm_before_gate: bool
    group_size: int
    fp32_weight: bool
    activation: str
    need_dweight: bool


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dispatch("rms_norm_gated")
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    fp32_weight: bool = False,
    activation: str = "silu",
    backend: str | None = None,
) -> Tensor:
    """y = rms_norm(x) * weight * act(gate), or, if not norm_before_gate, y = rms_norm(x * act(gate)) * weight.

    x, gate: (..., N) bf16|fp16|fp32, one shape and dtype.   weight: (N,), any of these dtypes.   Returns (..., N).
    The mean of squares is that of group_size neighbours of a row; None: of the row.   activation: "silu" or "sigmoid".

    act(gate), its product and the mean are float32.  Rounding follows the model the weights come from:
      default                  the norm is rounded to x's dtype, then multiplied by weight, and that product, of dtype
                               promote(x, weight), by act(gate) (Qwen3-Next, Qwen3.5, OLMo-Hybrid)
      norm_before_gate=False   the norm is rounded to x's dtype, then multiplied by weight (Mamba-2, Bamba, Granite-4;
                               with group_size Zamba-2 and Nemotron-H)
      fp32_weight=True         either order in float32, rounded once to x's dtype (Falcon-H1; Kimi-Linear "sigmoid")
    The result has x's dtype; promote(x, weight) with norm_before_gate=False and fp32_weight=False.

    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, tensors that differ in shape, dtype or device, weight not (N,), a group_size
    that does not divide N, and other activations.
    Source: Dao and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Delta Networks", 2025.
    """
    if group_size is not None and as_int("rms_norm_gated", "group_size", group_size) < 1:
        raise InputError(f"rms_norm_gated: group_size is {group_size}; needs a positive divisor of N, or None.")
    args = RmsNormGatedArgs(x, gate, weight, eps, norm_before_gate, group_size or 0, fp32_weight, activation)
    return call(CONTRACT, args, backend)


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    fp32_weight: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    dtype, n = rows.accumulate_dtype(x.dtype), x.shape[-1]
    act = ACTIVATIONS[activation](gate.to(dtype))
    hidden = x.to(dtype) if norm_before_gate else x.to(dtype) * act
    size = group_size or n
    groups = hidden.unflatten(-1, (n // max(size, 1), size))
    hidden = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    hidden = weight.to(dtype) * hidden if fp32_weight else weight * hidden.to(x.dtype)
    hidden = hidden * act if norm_before_gate else hidden
    return hidden.to(out_dtype(x, weight, norm_before_gate or fp32_weight))


def _forward(args: RmsNormGatedArgs) -> Tensor:
    return reference(**args._asdict())


def _backward(args: RmsNormGatedBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    options = args._asdict()
    for name in ("dy", "x", "gate", "weight", "need_dweight"):
        del options[name]

    def forward(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return reference(x, gate, weight, **options)

    dx, dgate, dweight = vjp(forward, (args.x, args.gate, args.weight), (args.dy,))
    return dx, dgate, dweight if args.need_dweight else dweight.new_empty(0)


def out_dtype(x: Tensor, weight: Tensor, rounded_last: bool) -> torch.dtype:
    """Return the dtype of y: x's where rounding comes last, else torch's promotion of x and weight."""
    return x.dtype if rounded_last else torch.promote_types(x.dtype, weight.dtype)


def bucket(x: Tensor, group_size: int) -> rows.RowsBucket:
    """The bucket of the groups of `x` (..., N), each a row."""
    size = group_size or max(1, hint(x.shape[-1]))
    return rows.RowsBucket(row_bucket(x.numel() // size), size)


KERNELS = ("triton.rms_norm_gated",)

FORWARD = RawOp(
    "rms_norm_gated",
    "fwd",
    RmsNormGatedArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, out_dtype(args.x, args.weight, args.norm_before_gate or args.fp32_weight)),),
    reference=_forward,
    bucket=lambda args: bucket(args.x, args.group_size),
    bucket_names=rows.RowsBucket._fields,
)
BACKWARD = RawOp(
    "rms_norm_gated",
    "bwd",
    RmsNormGatedBackwardArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, args.x.dtype),
        (args.x.shape, args.x.dtype),
        (args.weight.shape if args.need_dweight else (0,), args.weight.dtype),
    ),
    reference=_backward,
    bucket=lambda args: bucket(args.x, args.group_size),
    bucket_names=rows.RowsBucket._fields,
    count=3,
)


def check(args: RmsNormGatedArgs) -> None:
    """Raise InputError for what the docstring of `rms_norm_gated` excludes."""
    rows.check_floating("rms_norm_gated", x=args.x, gate=args.gate, weight=args.weight)
    rows.check_same("rms_norm_gated", x=args.x, gate=args.gate)
    rows.check_vector("rms_norm_gated", args.x, weight=args.weight)
    n = args.x.shape[-1]
    if args.group_size and n % args.group_size != 0:
        raise InputError(f"rms_norm_gated: group_size is {args.group_size}, N is {n}; needs a divisor of N.")
    if args.activation not in ACTIVATIONS:
        raise InputError(
            f"rms_norm_gated: activation is {args.activation!r}; needs one of {', '.join(map(repr, ACTIVATIONS))}."
        )


_OPTIONS = ("eps", "norm_before_gate", "fp32_weight", "activation")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N columns of a group, optional groups, weight_dtype, scale, and the options of the op."""
    groups, size = params.get("groups", 1), params["N"]
    rng, shape = rows.generator(seed), (params["M"], groups * size)
    x = rows.random_tensor(shape, dtype, device, rng, scale=params.get("scale", 1.0))
    gate = rows.random_tensor(shape, dtype, device, rng)
    weight = rows.random_tensor(shape[1:], params.get("weight_dtype", dtype), device, rng)
    options = {name: params[name] for name in _OPTIONS if name in params}
    return Sample((x, gate, weight), options | ({"group_size": size} if groups > 1 else {}))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x, gate and weight, writes y.  Backward reads dy, x, gate and weight, writes three gradients."""
    x, gate, weight = sample.args
    if direction == "fwd":
        return Cost(9 * x.numel(), rows.nbytes(x, gate, weight), rows.nbytes(x))
    return Cost(20 * x.numel(), rows.nbytes(x, x, gate, weight), rows.nbytes(x, gate, weight))


def _backward_args(grads: Any, saved: Any, args: RmsNormGatedArgs, needs: Any) -> RmsNormGatedBackwardArgs:
    (dy,), (x, gate, weight) = grads, saved
    return RmsNormGatedBackwardArgs(dy, x, gate, weight, *args[3:], needs.weight)


def _bad(device: torch.device, gate: Sequence[int] = (4, 8), weight: int = 8, **options: Any) -> Sample:
    shapes = (4, 8), tuple(gate), (weight,)
    return Sample(tuple(torch.ones(shape, device=device) for shape in shapes), options)


FIRST = {"norm_before_gate": False}

CONTRACT = register(
    Contract(
        name="rms_norm_gated",
        family="norm",
        summary="RMS normalisation with a gate before or after it",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "gate", "weight"),
            save=lambda args, outputs: (args.x, args.gate, args.weight),
            raw_args=_backward_args,
        ),
        workloads=(
            Workload("qwen3_next_train", {"M": 8192 * 32, "N": 128}),
            Workload("mamba2_2.7b_train", {**FIRST, "M": 8192, "N": 5120}),
            Workload("nemotron_h_8b_train", {**FIRST, "M": 8192, "N": 1024, "groups": 8}),
            Workload("qwen3_next_decode", {"M": 16 * 32, "N": 128}, directions=("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 1024}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("mamba2: the gate comes first", {**FIRST, "M": 7, "N": 528}),
            Workload("groups: several means in a row", {"M": 9, "N": 24, "groups": 5}),
            Workload("zamba2: the gate first, in groups", {**FIRST, "M": 5, "N": 32, "groups": 3}),
            Workload("long: groups of more than one block", {**FIRST, "M": 2, "N": 8200}),
            Workload("falcon_h1: one rounding, the gate first", {**FIRST, "M": 9, "N": 64, "fp32_weight": True}),
            Workload("kimi: one rounding, a sigmoid", {"M": 9, "N": 64, "fp32_weight": True, "activation": "sigmoid"}),
            Workload("mixed: float32 weight promotes", {**FIRST, "M": 4, "N": 40, "weight_dtype": torch.float32}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("shapes differ", lambda d: _bad(d, gate=(4, 1)), "must have one shape and dtype"),
            BadInput("weight too short", lambda d: _bad(d, weight=7), r"weight is \(7,\); needs \(8,\)"),
            BadInput("groups of uneven size", lambda d: _bad(d, group_size=3), "needs a divisor of N"),
            BadInput("no group", lambda d: _bad(d, group_size=0), "needs a positive divisor of N"),
            BadInput("another activation", lambda d: _bad(d, activation="gelu"), "activation is 'gelu'"),
        ),
        edge_grid={"groups": (1, 2, 5)},
    )
)
