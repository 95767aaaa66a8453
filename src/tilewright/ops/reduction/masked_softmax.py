"""Softmax of scores under a mask, with a temperature: forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows


class MaskedSoftmaxArgs(NamedTuple):
    x: Tensor  # (..., Q, K)
    mask: Tensor | None  # broadcasts to x: bool, True keeps; or floating, added
    causal: bool
    temperature: float


class MaskedSoftmaxBackwardArgs(NamedTuple):
    dy: Tensor  # (..., Q, K)
    y: Tensor  # (..., Q, K)
    temperature: float


@dispatch("masked_softmax")
def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    temperature: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """y = softmax(x / temperature + mask) over the last dimension, in float32, rounded once.

    x: (..., Q, K) bf16|fp16|fp32, scores of queries and keys.   Returns x's shape and dtype.
    mask: bool, True where a query sees a key, or floating and added; broadcasts to x's shape.  It has no gradient.
    causal: query i sees the keys j <= i + (K - Q), so the last query sees all.   temperature: above 0.

    A row without a visible key gives 0, and has gradient 0, as in scaled_dot_product_attention; torch.softmax gives NaN
    for it.  A key is invisible by False, by causal, or where the sum is -inf.  What is hidden by False or by causal may
    be NaN; a row with NaN or +inf elsewhere is NaN.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, fewer than two dimensions, a mask that does not broadcast or that requires a
    gradient, and a temperature that is not above 0 and finite.
    Source: Vaswani et al., "Attention is all you need", 2017.
    """
    return call(CONTRACT, MaskedSoftmaxArgs(x, mask, causal, temperature), backend)


def reference(x: Tensor, mask: Tensor | None = None, *, causal: bool = False, temperature: float = 1.0) -> Tensor:
    """Plain torch: what changes scores widens them to float32, what hides them does not."""
    added = mask is not None and mask.dtype != torch.bool
    scores = x.to(rows.accumulate_dtype(x.dtype)) / temperature if added or temperature != 1 else x
    if mask is not None:
        scores = scores + mask.to(scores.dtype) if added else torch.where(mask, scores, -torch.inf)
    if causal:
        q, k = x.shape[-2:]
        visible = torch.ones(q, k, dtype=torch.bool, device=x.device).tril(k - q)
        scores = torch.where(visible, scores, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    y = torch.softmax(torch.where(empty, 0.0, scores), -1)
    return torch.where(empty, 0.0, y).to(x.dtype)


def _backward(args: MaskedSoftmaxBackwardArgs) -> Tensor:
    """The gradient of softmax at y over its sum: y was rounded, and a constant dy has gradient 0."""
    dtype = rows.accumulate_dtype(args.y.dtype)
    dy, y = args.dy.to(dtype), args.y.to(dtype)
    total = y.sum(-1, keepdim=True)
    mean = (dy * y).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
    return (y * (dy - mean) / args.temperature).to(args.y.dtype)


KERNELS = ("triton.masked_softmax",)

FORWARD = RawOp(
    "masked_softmax",
    "fwd",
    MaskedSoftmaxArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: reference(args.x, args.mask, causal=args.causal, temperature=args.temperature),
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
)
BACKWARD = RawOp(
    "masked_softmax",
    "bwd",
    MaskedSoftmaxBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.y.shape, args.y.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.y),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: MaskedSoftmaxArgs) -> None:
    """Raise InputError for what the docstring of `masked_softmax` excludes."""
    x, mask, _, temperature = args
    rows.check_floating("masked_softmax", x=x)
    if x.dim() < 2:
        raise InputError(f"masked_softmax: x is {tuple(x.shape)}; needs (..., Q, K).")
    if not 0.0 < temperature < float("inf"):
        raise InputError(f"masked_softmax: temperature is {temperature}; needs a finite number above 0.")
    if mask is None:
        return
    if mask.dtype not in (torch.bool, *rows.FLOATS):
        raise InputError(f"masked_softmax: mask is {mask.dtype}; needs bool, True to keep, or a floating dtype to add.")
    if mask.device != x.device:
        raise InputError(f"masked_softmax: mask is on {mask.device}, x on {x.device}. Move them to one device.")
    if mask.requires_grad and torch.is_grad_enabled():
        raise InputError("masked_softmax: mask requires a gradient and gets none. Add it to x, or detach it.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(n not in (1, size) for n, size in sizes):
        raise InputError(f"masked_softmax: mask is {tuple(mask.shape)}; needs to broadcast to x, {tuple(x.shape)}.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: B, H, M, N for x (B, H, M, N), optional causal, temperature; mask: "keys" (B, 1, 1, N) bool, with a row
    without a key, or "bias" (M, N).
    """
    rng = rows.generator(seed)
    b, h, m, n = (params[k] for k in "BHMN")
    x = rows.random_tensor((b, h, m, n), dtype, device, rng)
    options = {k: params[k] for k in ("causal", "temperature") if k in params}
    if params.get("mask") == "keys":
        mask = rows.random_tensor((b, 1, 1, n), torch.float32, device, rng) > 0
        mask[:1] = False
        options["mask"] = mask
    elif params.get("mask") == "bias":
        options["mask"] = rows.random_tensor((m, n), dtype, device, rng)
    return Sample((x,), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and the mask, writes y.  Backward reads dy and y, writes dx.  Of causal scores half is read."""
    (x,) = sample.args
    read = rows.nbytes(x) // (2 if sample.kwargs.get("causal") else 1)
    if direction == "fwd":
        return Cost(7 * x.numel(), read + rows.nbytes(sample.kwargs.get("mask")), rows.nbytes(x))
    return Cost(5 * x.numel(), rows.nbytes(x, x), rows.nbytes(x))


def _raw_args(grads: Any, saved: Any, args: MaskedSoftmaxArgs, needs: Any) -> MaskedSoftmaxBackwardArgs:
    (dy,), (y,) = grads, saved
    return MaskedSoftmaxBackwardArgs(dy, y, args.temperature)


def _bad(device: torch.device, shape: tuple[int, ...] = (2, 4, 8), **options: Any) -> Sample:
    return Sample((torch.ones(shape, device=device),), options)


CONTRACT = register(
    Contract(
        name="masked_softmax",
        family="softmax",
        summary="softmax of scores under a mask, causal or given, with a temperature",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: outputs,
            raw_args=_raw_args,
        ),
        workloads=(
            Workload("scores_4k_causal", {"B": 1, "H": 8, "M": 4096, "N": 4096, "causal": True}),
            Workload("scores_4k_keys", {"B": 2, "H": 4, "M": 4096, "N": 4096, "mask": "keys"}),
        ),
        cpu_workloads=(Workload("small", {"B": 2, "H": 2, "M": 256, "N": 256, "mask": "keys"}),),
        edge_cases=(
            Workload("causal: fewer queries than keys", {"B": 1, "H": 2, "M": 5, "N": 33, "causal": True}),
            Workload("no_keys: the first queries see nothing", {"B": 1, "H": 1, "M": 9, "N": 4, "causal": True}),
            Workload("keys: of one sequence none", {"B": 2, "H": 3, "M": 4, "N": 40, "mask": "keys"}),
            Workload(
                "bias: added, with a temperature", {"B": 2, "H": 2, "M": 3, "N": 17, "mask": "bias", "temperature": 0.7}
            ),
            Workload("long_row: read in parts", {"B": 1, "H": 1, "M": 2, "N": 9001, "temperature": 2.0}),
            Workload("empty: no batch", {"B": 0, "H": 2, "M": 4, "N": 8}),
        ),
        bad_inputs=(
            BadInput("a vector", lambda d: _bad(d, (8,)), r"x is \(8,\); needs \(\.\.\., Q, K\)"),
            BadInput("temperature 0", lambda d: _bad(d, temperature=0.0), "temperature is 0.0; needs a finite"),
            BadInput(
                "mask of integers",
                lambda d: _bad(d, mask=torch.ones(4, 8, dtype=torch.int32, device=d)),
                "mask is torch.int32",
            ),
            BadInput(
                "mask of another shape",
                lambda d: _bad(d, mask=torch.ones(4, 7, dtype=torch.bool, device=d)),
                r"mask is \(4, 7\); needs to broadcast to x",
            ),
        ),
        batch_dim=None,  # a mask may have the dimension too
        gradient_tolerance=6.0,  # of y as it was rounded; where the reference widens scores, its autograd is not
    )
)
