"""RMSNorm: every Hugging Face variant, forward and backward."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows


class RmsNormArgs(NamedTuple):
    x: Tensor  # (..., N)
    weight: Tensor | None  # (N,)
    eps: float
    offset: float
    fp32_weight: bool


class RmsNormBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    x: Tensor  # (..., N)
    weight: Tensor | None  # (N,)
    eps: float
    offset: float
    fp32_weight: bool
    need_dweight: bool


@dispatch("rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), the mean over the last dimension, in float32.

    x: (..., N) bf16|fp16|fp32.   weight: (N,), any of these dtypes, or None.   Returns (..., N).

    Rounding follows the model the weights come from:
      default             x / rms is rounded to x's dtype, then multiplied by weight (Llama, Qwen, Mistral, DeepSeek)
      fp32_weight=True    multiplied by weight in float32, rounded once to x's dtype (OLMo-2, GPT-OSS)
      offset=1.0          (1 + weight) in float32, rounded once (Gemma); any offset other than 0 implies fp32_weight
      weight=None         x / rms is rounded to x's dtype (queries and keys of Llama-4, values of Gemma-3n)
    The result has dtype promote(x, weight) by default, and x's dtype in the others.
    Liger's casting_mode "llama" is the default, and its "gemma" is `offset`, or fp32_weight=True where the offset is 0.
    Its "none" sums the squares in x's dtype; here they are always summed in float32.

    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "cutile", "cpu", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, weight not (N,), tensors on different devices, and an offset
    without a weight.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    args = RmsNormArgs(x, weight, eps, offset, True if offset != 0.0 else fp32_weight)
    return call(CONTRACT, args, backend, out)


def reference(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, fp32_weight: bool = False
) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    x_fp32 = x.to(rows.accumulate_dtype(x.dtype))
    x_hat = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if fp32_weight or offset != 0.0:
        w = weight.to(x_fp32.dtype)
        return (x_hat * (offset + w) if offset != 0.0 else w * x_hat).to(x.dtype)
    return weight * x_hat.to(x.dtype)


def _forward(args: RmsNormArgs) -> Tensor:
    x, weight, eps, offset, fp32_weight = args
    return reference(x, weight, eps=eps, offset=offset, fp32_weight=fp32_weight)


def _backward(args: RmsNormBackwardArgs) -> tuple[Tensor, Tensor]:
    def forward(x: Tensor, *weight: Tensor) -> Tensor:
        return reference(x, *weight, eps=args.eps, offset=args.offset, fp32_weight=args.fp32_weight)

    dx, *dweight = vjp(forward, inputs_of(args.x, args.weight), (args.dy,))
    return dx, dweight[0] if args.need_dweight else dx.new_empty(0, dtype=weight_dtype(args.x, args.weight))


def inputs_of(x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    """What a gradient may be taken of."""
    return (x,) if weight is None else (x, weight)


def weight_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype of dweight, which is empty without a weight."""
    return x.dtype if weight is None else weight.dtype


def out_dtype(x: Tensor, weight: Tensor | None, fp32_weight: bool) -> torch.dtype:
    """Return the dtype of y: x's without a weight and in the float32 forms, else torch's promotion of x and weight."""
    return x.dtype if fp32_weight else torch.promote_types(x.dtype, weight_dtype(x, weight))


def is_plain(weight: Tensor | None) -> bool:
    """Do all kernels take this weight?  cuTile's take neither None nor float64."""
    return weight is not None and weight.dtype != torch.float64


KERNELS = ("triton.rms_norm", "cutile.rms_norm", "cpu.rms_norm")

FORWARD = RawOp(
    "rms_norm",
    "fwd",
    RmsNormArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, out_dtype(args.x, args.weight, args.fp32_weight)),),
    reference=_forward,
    bucket=lambda args: rows.plain_rows_bucket(args.x, is_plain(args.weight)),
    bucket_names=rows.PlainRowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "rms_norm",
    "bwd",
    RmsNormBackwardArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, args.x.dtype),
        ((args.x.shape[-1] if args.need_dweight else 0,), weight_dtype(args.x, args.weight)),
    ),
    reference=_backward,
    bucket=lambda args: rows.plain_rows_bucket(args.dy, is_plain(args.weight)),
    bucket_names=rows.PlainRowsBucket._fields,
    count=2,
)


def check(args: RmsNormArgs) -> None:
    """Raise InputError for what the docstring of `rms_norm` excludes."""
    check_weight("rms_norm", args, x=args.x)


def check_weight(op: str, args: Any, **tensors: Tensor) -> None:
    """Raise InputError for dtypes, devices and shapes of `tensors` and of args.weight, and for an offset to none."""
    weight = {} if args.weight is None else {"weight": args.weight}
    rows.check_floating(op, **tensors, **weight)
    rows.check_vector(op, tensors["x"], **weight)
    if args.weight is None and args.offset != 0.0:
        raise InputError(f"{op}: offset is {args.offset:g} and weight is None; it is added to a weight. Pass one.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional weight_dtype (None: no weight), offset, fp32_weight, eps."""
    rng = rows.generator(seed)
    x = rows.random_tensor((params["M"], params["N"]), dtype, device, rng, scale=params.get("scale", 1.0))
    weight_dtype = params.get("weight_dtype", dtype)
    weight = None if weight_dtype is None else rows.random_tensor((params["N"],), weight_dtype, device, rng)
    options = {k: params[k] for k in ("offset", "fp32_weight", "eps") if k in params}
    return Sample((x, weight), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and weight, writes y.  Backward reads dy, x, weight, writes dx and dweight."""
    x, weight = sample.args
    if direction == "fwd":
        return Cost(4 * x.numel(), rows.nbytes(x, weight), rows.nbytes(x))
    return Cost(10 * x.numel(), rows.nbytes(x, x, weight), rows.nbytes(x, weight))


def _backward_args(grads: Any, saved: Any, args: RmsNormArgs, needs: Any) -> RmsNormBackwardArgs:
    (dy,), (x, weight) = grads, saved
    return RmsNormBackwardArgs(dy, x, weight, args.eps, args.offset, args.fp32_weight, needs.weight)


def _bad(device: torch.device, x: Sequence[int], w: Sequence[int], dtype: torch.dtype = torch.float32) -> Sample:
    return Sample((torch.ones(tuple(x), device=device, dtype=dtype), torch.ones(tuple(w), device=device)))


def _no_weight(device: torch.device) -> Sample:
    return Sample((torch.ones(4, 8, device=device),), {"offset": 1.0})


CONTRACT = register(
    Contract(
        name="rms_norm",
        family="norm",
        summary="RMS normalisation over the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "weight"),
            save=lambda args, outputs: (args.x, args.weight),
            raw_args=_backward_args,
        ),
        workloads=(
            Workload("llama8b_train", {"M": 8192, "N": 4096}),
            Workload("llama8b_long", {"M": 32768, "N": 4096}),
            Workload("llama70b_train", {"M": 8192, "N": 8192}),
            *(Workload(f"decode_{m}", {"M": m, "N": 4096}, directions=("fwd",)) for m in (1, 2, 4, 8, 16, 32, 64)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("n_1: mean of one element", {"M": 5, "N": 1}),
            Workload("long_row: more than one block of a row", {"M": 2, "N": 20000}),
            Workload("gemma: offset 1 in float32", {"M": 33, "N": 512, "offset": 1.0}),
            Workload("olmo2: weight in float32, one rounding", {"M": 33, "N": 512, "fp32_weight": True}),
            Workload("mixed: float32 weight promotes the result", {"M": 9, "N": 128, "weight_dtype": torch.float32}),
            Workload("plain: no weight", {"M": 9, "N": 128, "weight_dtype": None}),
            Workload("tiny_values: eps dominates", {"M": 4, "N": 64, "scale": 1e-5, "eps": 1e-6}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("weight too short", lambda d: _bad(d, (4, 8), (7,)), r"weight is \(7,\); needs \(8,\)"),
            BadInput("weight 2-D", lambda d: _bad(d, (4, 8), (1, 8)), r"needs \(8,\)"),
            BadInput("integers", lambda d: _bad(d, (4, 8), (8,), torch.int32), "x is torch.int32"),
            BadInput("scalar", lambda d: _bad(d, (), (8,)), "no dimensions"),
            BadInput("offset to no weight", _no_weight, r"offset is 1 and weight is None"),
        ),
    )
)
