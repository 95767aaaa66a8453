"""GroupNorm, forward and backward."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows


class GroupNormArgs(NamedTuple):
    x: Tensor  # (B, C, ...)
    weight: Tensor | None  # (C,)
    bias: Tensor | None  # (C,)
    num_groups: int
    eps: float


class GroupNormBackwardArgs(NamedTuple):
    dy: Tensor  # (B, C, ...)
    x: Tensor  # (B, C, ...)
    weight: Tensor | None  # (C,)
    num_groups: int
    eps: float
    need_dweight: bool
    need_dbias: bool


class GroupsBucket(NamedTuple):
    """The tuning key: groups of all samples, rounded up to a power of two; channels and positions of one group."""

    M: int
    C: int
    S: int
    channels_last: int


@dispatch("group_norm")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias in float32, rounded once: torch.nn.functional.group_norm.

    x: (B, C, ...) bf16|fp16|fp32, any number of dimensions after the channels.   weight, bias: (C,) of x's dtype, or
    None.   Returns x's shape and dtype.
    Mean and variance (biased) are those of a group: C / num_groups neighbouring channels of a sample, at all positions.

    The result is contiguous, or in torch.channels_last (channels_last_3d) where x is; other strides are copied first.
    num_groups: divides C; 1 normalises whole samples, C each channel of a sample (InstanceNorm).
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other shapes, dtypes and devices, and for a num_groups that does not divide C.
    Source: Wu and He, "Group Normalization", 2018.
    """
    if type(num_groups) is not int:
        num_groups = as_int("group_norm", "num_groups", num_groups)
    return call(CONTRACT, GroupNormArgs(x, weight, bias, num_groups, eps), backend)


def reference(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Plain torch.  Not torch.group_norm: in torch 2.13 its gradient on a CPU ends the process for some channels_last
    calls, and is not defined for a bias without a weight.
    """
    groups = x.to(rows.accumulate_dtype(x.dtype)).unflatten(1, (num_groups, x.shape[1] // num_groups))
    group = tuple(range(2, groups.dim()))
    centred = groups - groups.mean(group, keepdim=True)
    y = (centred * torch.rsqrt(centred.pow(2).mean(group, keepdim=True) + eps)).flatten(1, 2)
    channels = (-1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.view(channels)
    y = y if bias is None else y + bias.view(channels)
    return dense(y.to(x.dtype), x)


def _backward(args: GroupNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    x = args.x
    w = x.new_ones(x.shape[1]) if args.weight is None else args.weight

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reference(x, args.num_groups, w, b, eps=args.eps)

    dx, dw, db = vjp(forward, (x, w, torch.zeros_like(w)), (args.dy,))
    return dx, dw if args.need_dweight else x.new_empty(0), db if args.need_dbias else x.new_empty(0)


def channels_last(x: Tensor) -> bool:
    """Whether y and dx are in channels_last: `x` is dense in it, and not contiguous."""
    return x.dim() in (4, 5) and _is_dense(x, (0, *range(2, x.dim()), 1)) and not _is_dense(x, range(x.dim()))


def _is_dense(x: Tensor, dims: Sequence[int]) -> bool:
    """Is `x` one run of memory whose slowest dimension is the first of `dims`?"""
    stride = 1
    for dim in reversed(dims):
        if x.shape[dim] != 1 and x.stride(dim) != stride:
            return False
        stride = stride * x.shape[dim]
    return True


def dense(t: Tensor, x: Tensor) -> Tensor:
    """Return `t` in the order in memory of y and dx, a copy where it is not."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last(x) else t.contiguous()


def strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of y and dx."""
    dims = (0, *range(2, x.dim()), 1) if channels_last(x) else range(x.dim())
    result, stride = [1] * x.dim(), 1
    for dim in reversed(dims):
        result[dim] = stride
        stride = stride * max(x.shape[dim], 1)
    return tuple(result)


def bucket(x: Tensor, num_groups: int) -> GroupsBucket:
    """The bucket of `x` (B, C, ...).  Nothing is launched for a tensor without elements."""
    channels, positions = hint(x.shape[1]) // num_groups, math.prod(hint(n) for n in x.shape[2:])
    return GroupsBucket(row_bucket(x.shape[0] * num_groups), max(1, channels), max(1, positions), int(channels_last(x)))


KERNELS = ("triton.group_norm",)

FORWARD = RawOp(
    "group_norm",
    "fwd",
    GroupNormArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype, strides(args.x)),),
    reference=lambda args: reference(args.x, args.num_groups, args.weight, args.bias, eps=args.eps),
    bucket=lambda args: bucket(args.x, args.num_groups),
    bucket_names=GroupsBucket._fields,
)
BACKWARD = RawOp(
    "group_norm",
    "bwd",
    GroupNormBackwardArgs,
    package="tilewright.ops.norm",
    kernels=KERNELS,
    outputs=lambda args: (
        (args.x.shape, args.x.dtype, strides(args.x)),
        ((args.x.shape[1] if args.need_dweight else 0,), args.x.dtype),
        ((args.x.shape[1] if args.need_dbias else 0,), args.x.dtype),
    ),
    reference=_backward,
    bucket=lambda args: bucket(args.x, args.num_groups),
    bucket_names=GroupsBucket._fields,
    count=3,
)


def check(args: GroupNormArgs) -> None:
    """Raise InputError for what the docstring of `group_norm` excludes."""
    x, groups = args.x, args.num_groups
    affine = {name: t for name, t in (("weight", args.weight), ("bias", args.bias)) if t is not None}
    rows.check_floating("group_norm", x=x, **affine)
    if x.dim() < 2:
        raise InputError(f"group_norm: x is {tuple(x.shape)}; needs (B, C, ...).")
    channels = x.shape[1]
    if groups < 1 or channels % groups != 0:
        raise InputError(
            f"group_norm: num_groups is {groups}, x has {channels} channels; needs a positive divisor of them."
        )
    for name, t in affine.items():
        if t.dim() != 1 or t.shape[0] != channels:
            raise InputError(f"group_norm: {name} is {tuple(t.shape)}; needs ({channels},), the channels of x.")
        if t.dtype != x.dtype:
            raise InputError(
                f"group_norm: {name} is {t.dtype}, x is {x.dtype}; they must have one dtype. Cast one of them."
            )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: B, G, C channels a group, S (a length, or several), optional affine ("both", "weight", "none"), mean,
    channels_last (a length S is then an image of S x 1).
    """
    rng, last = rows.generator(seed), params.get("channels_last", False)
    channels, positions = params["G"] * params["C"], params["S"]
    if not isinstance(positions, tuple):
        positions = (positions, 1) if last else (positions,)
    shape = (params["B"], channels, *positions)
    x = (rows.random_tensor(shape, torch.float32, device, rng) + params.get("mean", 0.0)).to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (rows.random_tensor((channels,), dtype, device, rng) for _ in range(2))
    affine = params.get("affine", "both")
    return Sample((x, params["G"], None if affine == "none" else weight, bias if affine == "both" else None))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x, weight, bias, writes y.  Backward reads dy, x, weight, writes dx, dweight, dbias."""
    x, _, weight, bias = sample.args
    if direction == "fwd":
        return Cost(6 * x.numel(), rows.nbytes(x, weight, bias), rows.nbytes(x))
    return Cost(14 * x.numel(), rows.nbytes(x, x, weight), rows.nbytes(x, weight, bias))


def _backward_args(grads: Any, saved: Any, args: GroupNormArgs, needs: Any) -> GroupNormBackwardArgs:
    (dy,), (x, weight) = grads, saved
    return GroupNormBackwardArgs(dy, x, weight, args.num_groups, args.eps, needs.weight, needs.bias)


def _bad(
    device: torch.device, *, shape: tuple[int, ...] = (2, 6, 4), groups: int = 3, dtype: torch.dtype = torch.float32
) -> Sample:
    return Sample((torch.ones(shape, device=device), groups, torch.ones(6, device=device, dtype=dtype)))


LAST = {"B": 2, "G": 2, "channels_last": True}

CONTRACT = register(
    Contract(
        name="group_norm",
        family="norm",
        summary="normalisation over groups of channels",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "weight", "bias"),
            save=lambda args, outputs: (args.x, args.weight),
            raw_args=_backward_args,
        ),
        workloads=(
            Workload("sdxl_64x64", {"B": 2, "G": 32, "C": 20, "S": (64, 64)}),
            Workload("sdxl_16x16", {"B": 2, "G": 32, "C": 40, "S": (16, 16)}),
            Workload("vae_512x512", {"B": 1, "G": 32, "C": 4, "S": (512, 512)}),
            Workload("sdxl_64x64_last", {"B": 2, "G": 32, "C": 20, "S": (64, 64), "channels_last": True}),
        ),
        cpu_workloads=(Workload("small", {"B": 2, "G": 8, "C": 8, "S": (32, 32)}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd: tails of channels and of positions are masked", {"B": 4, "G": 2, "C": 3, "S": (5, 7)}),
            Workload("long: a group of several tiles", {"B": 2, "G": 2, "C": 5, "S": 1030}),
            Workload("wide: more channels than a tile has rows", {"B": 1, "G": 2, "C": 520, "S": 9}),
            Workload("channels_last: neighbours in memory are channels", {**LAST, "C": 5, "S": (6, 5)}),
            Workload("long_last: several tiles of them", {**LAST, "C": 70, "S": (9, 8)}),
            Workload("no_positions: one number a channel", {"B": 5, "G": 3, "C": 4, "S": ()}),
            Workload("mean: large against the deviation", {"B": 2, "G": 3, "C": 4, "S": 40, "mean": 30.0}),
            Workload("plain: no weight, no bias", {"B": 2, "G": 1, "C": 6, "S": 10, "affine": "none"}),
            Workload("empty: no samples", {"B": 0, "G": 2, "C": 3, "S": 4}),
        ),
        bad_inputs=(
            BadInput("groups of uneven size", lambda d: _bad(d, groups=4), "num_groups is 4, x has 6 channels"),
            BadInput("no groups", lambda d: _bad(d, groups=0), "needs a positive divisor"),
            BadInput("weight too long", lambda d: _bad(d, shape=(2, 3, 4)), r"weight is \(6,\); needs \(3,\)"),
            BadInput("weight of another dtype", lambda d: _bad(d, dtype=torch.bfloat16), "must have one dtype"),
            BadInput("vector", lambda d: _bad(d, shape=(6,)), r"x is \(6,\); needs \(B, C, ...\)"),
        ),
        edge_grid={"C": (1, 2, 3, 8, 10)},
    )
)
