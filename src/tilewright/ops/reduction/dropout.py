"""Dropout by counters: the mask is computed, never stored, and is computed again in the backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import (
    BadInput,
    Contract,
    Cost,
    Gradient,
    RawOp,
    Sample,
    Workload,
    call,
    dispatch,
    register,
)
from tilewright.dispatch.arguments import as_bool
from tilewright.errors import InputError
from tilewright.ops import philox, rows

WORDS = 4  # elements that share a counter


class DropoutArgs(NamedTuple):
    x: Tensor  # (..., N)
    residual: Tensor | None  # (..., N)
    seed: Tensor  # () int64
    offset: Tensor | None  # () int64, None: 0
    p: float


class DropoutBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    seed: Tensor  # ()
    offset: Tensor | None  # ()
    p: float


@dispatch("dropout")
def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    residual: Tensor | None = None,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    training: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = x / (1 - p) where the mask keeps an element, else 0, with probability p; plus residual where one is given.

    x: (..., N) bf16|fp16|fp32; a tensor that is not contiguous costs a copy.   Returns x's shape and dtype.
    residual: as x.  The scaled x is rounded to its dtype before it is added, as without fusion.
    p: 0 to 1, rounded to a multiple of 2^-31; 0 keeps all, 1 none.   training=False counts as p = 0.
    A dropped element gives 0, and has gradient 0, also where x is NaN or infinite.

    The mask is a function of (seed, offset, index of the element in row-major order) alone: not of the backend, the
    GPU, the strides or the dtype.  Nothing is saved for the backward but seed and offset.
    seed, offset: int64 numbers, or () int64 tensors on x's device, which are read there: a CUDA graph replays with what
    they hold then.  They must stay unchanged until the backward, or torch refuses it.  A number is first written to the
    device, a launch each.  Other offsets of a seed give independent masks: use one seed a model, and an offset for each
    layer and step.

    Element i is dropped if word i % 4 of Philox 4x32-10 with key `seed` and counter (i / 4, offset), each 64 bits, is
    below p * 2^32.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, p outside 0 to 1, a residual of another shape or dtype, seeds that are no int64.
    Source: Srivastava et al., "Dropout", 2014; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    if not as_bool("dropout", "training", training):
        p = 0.0
    seed, start = philox.on_device("dropout", "seed", seed, x), philox.start_of("dropout", offset, x)
    return call(CONTRACT, DropoutArgs(x, residual, seed, start, p), backend)


def reference(
    x: Tensor,
    p: float = 0.5,
    *,
    residual: Tensor | None = None,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    training: bool = True,
) -> Tensor:
    """Plain torch, on the device of x alone; the same mask."""
    seed, start = philox.on_device("dropout", "seed", seed, x), philox.start_of("dropout", offset, x)
    return _forward(DropoutArgs(x, residual, seed, start, p if training else 0.0))


def keep_mask(like: Tensor, seed: Tensor, offset: Tensor | None, p: float) -> Tensor:
    """Which elements of a tensor of this shape stay."""
    count = like.numel()
    counter = torch.arange(-(-count // WORDS), device=like.device)
    start = torch.zeros_like(counter) if offset is None else offset.expand_as(counter)
    words = philox.philox(
        seed,
        counter & philox.MASK,
        (counter >> 32) & philox.MASK,
        start & philox.MASK,
        (start >> 32) & philox.MASK,
    )
    random = torch.stack(words, -1).flatten()[:count].view(like.shape)
    return (random >> 1) > philox.last_dropped(p)


def _scaled(x: Tensor, seed: Tensor, offset: Tensor | None, p: float) -> Tensor:
    y = (x.to(rows.accumulate_dtype(x.dtype)) * philox.scale_of(p)).to(x.dtype)
    return torch.where(keep_mask(x, seed, offset, p), y, 0.0)


def _forward(args: DropoutArgs) -> Tensor:
    y = _scaled(args.x, args.seed, args.offset, args.p)
    return y if args.residual is None else y + args.residual


KERNELS = ("triton.dropout",)

FORWARD = RawOp(
    "dropout",
    "fwd",
    DropoutArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
)
BACKWARD = RawOp(
    "dropout",
    "bwd",
    DropoutBackwardArgs,
    package="tilewright.ops.reduction",
    kernels=KERNELS,
    outputs=lambda args: ((args.dy.shape, args.dy.dtype),),
    reference=lambda args: _scaled(*args),
    bucket=lambda args: rows.rows_bucket(args.dy),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: DropoutArgs) -> None:
    """Raise InputError for what the docstring of `dropout` excludes."""
    x, residual, seed, offset, p = args
    rows.check_floating("dropout", x=x)
    if residual is not None:
        rows.check_floating("dropout", x=x, residual=residual)
        rows.check_same("dropout", residual=residual, x=x)
    philox.check_seeds("dropout", x, seed, offset)
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout: p is {p}; needs a number 0 to 1.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional p, offset, training, residual."""
    rng = rows.generator(seed)
    shape = (params["M"], params["N"])
    x = rows.random_tensor(shape, dtype, device, rng)
    options: dict[str, Any] = {k: params[k] for k in ("p", "offset", "training") if k in params}
    if "residual" in params:
        options["residual"] = rows.random_tensor(shape, dtype, device, rng)
    return Sample((x,), {"seed": torch.tensor(seed + 17, device=device), **options})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x, and residual, and writes y.  Backward reads dy and writes dx."""
    (x,) = sample.args
    read = 1 if direction == "bwd" or sample.kwargs.get("residual") is None else 2
    return Cost((read + 1) * x.numel(), read * rows.nbytes(x), rows.nbytes(x))


def _save(args: DropoutArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    return args.seed, args.offset


def _raw_args(grads: Any, saved: Any, args: DropoutArgs, needs: Any) -> DropoutBackwardArgs:
    (dy,), (seed, offset) = grads, saved
    return DropoutBackwardArgs(dy, seed, offset, args.p)


def _others(grads: Any, saved: Any, args: DropoutArgs, needs: Any) -> dict[str, Tensor]:
    """The gradient of residual is that of y."""
    return {"residual": grads[0]} if needs.residual else {}


def _bad(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> Sample:
    return Sample((torch.ones(4, 8, device=device, dtype=dtype),), {"seed": 1, **options})


CONTRACT = register(
    Contract(
        name="dropout",
        family="dropout",
        summary="dropout whose mask is a function of seed, offset and index, with an optional residual",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(BACKWARD, inputs=("x",), save=_save, raw_args=_raw_args, others=_others, recomputes=False),
        workloads=(
            Workload("llama8b_train", {"M": 8192, "N": 4096, "p": 0.1}),
            Workload("llama8b_train_residual", {"M": 8192, "N": 4096, "p": 0.1, "residual": True}),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 4096}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("odd_n: the last counter has fewer elements", {"M": 7, "N": 333, "offset": 2**40 + 3}),
            Workload("residual: rounded before the sum", {"M": 9, "N": 130, "p": 0.1, "residual": True}),
            Workload("nothing_dropped: p is 0", {"M": 3, "N": 40, "p": 0.0}),
            Workload("all_dropped: p is 1", {"M": 3, "N": 40, "p": 1.0, "residual": True}),
            Workload("evaluation: no training", {"M": 3, "N": 40, "training": False}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("integers", lambda d: _bad(d, torch.int32), "x is torch.int32"),
            BadInput("p above 1", lambda d: _bad(d, p=1.5), "p is 1.5; needs a number 0 to 1"),
            BadInput("p is NaN", lambda d: _bad(d, p=float("nan")), "p is nan; needs a number 0 to 1"),
            BadInput("seed of 65 bits", lambda d: _bad(d, seed=2**63), "needs an integer of 64 bits"),
            BadInput(
                "a vector of seeds",
                lambda d: _bad(d, seed=torch.ones(4, dtype=torch.int64, device=d)),
                r"seed is torch.int64 \(4,\)",
            ),
            BadInput(
                "residual of another shape",
                lambda d: _bad(d, residual=torch.ones(4, 1, device=d)),
                r"residual is \(4, 1\) .* one shape and dtype",
            ),
        ),
        batch_dim=None,  # the mask depends on the place in the batch
    )
)
