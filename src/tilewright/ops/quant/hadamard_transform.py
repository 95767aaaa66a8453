"""Hadamard transform of the last dimension, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.quant.hadamard import LONGEST, SQUARES, factor, transform

OP = "hadamard_transform"


class HadamardArgs(NamedTuple):
    x: Tensor  # (..., N)
    scale: float


class HadamardBackwardArgs(NamedTuple):
    dy: Tensor  # (..., N)
    scale: float


@dispatch(OP)
def hadamard_transform(
    x: Tensor, scale: float | None = None, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """y = scale * H x along the last dimension, with the Hadamard matrix H of its size; sums in float32, rounded once.

    x: (..., N) bf16|fp16|fp32, N = 2^k or m * 2^k with m = 12, 20, 28, 36, 40, at most 32768.   Returns x's shape and
    dtype.   scale: by default 1 / sqrt(N), for which the transform is orthonormal and its own inverse: H is symmetric
    (`hadamard.py` has the matrices).   For powers of two H is scipy.linalg.hadamard's, and 1 the default elsewhere.

    Gradient: the same transform of dy.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for dtypes other than floating, a scalar, and sizes that have no matrix here.
    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
    """
    return call(CONTRACT, HadamardArgs(x, _scale(x, scale)), backend, out)


def reference(x: Tensor, scale: float | None = None) -> Tensor:
    """Plain torch; float32 sums for 16-bit dtypes."""
    return _scaled(x, _scale(x, scale))


def _scale(x: Tensor, scale: float | None) -> float:
    """Returns the scale of a call; 1 where `check` will refuse x."""
    if scale is not None:
        return scale
    n = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1
    return max(n, 1) ** -0.5


def _scaled(x: Tensor, scale: float) -> Tensor:
    return (transform(x.to(rows.accumulate_dtype(x.dtype))) * scale).to(x.dtype)


KERNELS = ("triton.hadamard_transform",)

FORWARD = RawOp(
    OP,
    "fwd",
    HadamardArgs,
    package="tilewright.ops.quant",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: _scaled(args.x, args.scale),
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    HadamardBackwardArgs,
    package="tilewright.ops.quant",
    kernels=KERNELS,
    outputs=lambda args: ((args.dy.shape, args.dy.dtype),),
    reference=lambda args: _scaled(args.dy, args.scale),
    bucket=lambda args: rows.rows_bucket(args.dy),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: HadamardArgs) -> None:
    """Raise InputError for what the docstring of `hadamard_transform` excludes."""
    rows.check_floating(OP, x=args.x)
    n = args.x.shape[-1]
    if n > LONGEST or factor(n) is None:
        raise InputError(
            f"{OP}: the last dimension of x is {n}; needs 2^k or m * 2^k with m = 12, 20, 28, 36 or 40, at most "
            f"{LONGEST}. Pad x with zeros, or transform blocks of such a size: x.unflatten(-1, (-1, block))."
        )


def fitting(n: int) -> int:
    """Returns the least size from n on that has a matrix."""
    sizes = [m << k for m in (1, *SQUARES) for k in range(16) if n <= m << k <= LONGEST]
    return min(sizes, default=LONGEST)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N (which becomes the next size that has a matrix), optional scale of the normal values, factor."""
    shape = (params["M"], fitting(params["N"]))
    x = rows.random_tensor(shape, dtype, device, rows.generator(seed), scale=params.get("scale", 1.0))
    return Sample((x,), {"scale": params["factor"]} if "factor" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads a tensor, writes one of its size; log2 N sums an element."""
    (x,) = sample.args
    return Cost(x.numel() * max(1, x.shape[-1].bit_length()), rows.nbytes(x), rows.nbytes(x))


def _bad(name: str, match: str, *shape: int, dtype: torch.dtype = torch.float32) -> BadInput:
    return BadInput(name, lambda d: Sample((torch.ones(shape, device=d, dtype=dtype),)), match)


CONTRACT = register(
    Contract(
        name=OP,
        family="quant",
        summary="Hadamard transform of the last dimension",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: (),
            raw_args=lambda grads, saved, args, needs: HadamardBackwardArgs(grads[0], args.scale),
        ),
        workloads=(
            Workload("heads_128", {"M": 262144, "N": 128}),
            Workload("hidden_4096", {"M": 8192, "N": 4096}),
            Workload("hidden_5120", {"M": 8192, "N": 5120}),
            Workload("llama3_8b_mlp", {"M": 8192, "N": 14336}),
            Workload("longest", {"M": 4096, "N": 32768}),
            Workload("decode_16", {"M": 16, "N": 4096}, directions=("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"M": 512, "N": 1024}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            Workload("n_1: only the scale", {"M": 5, "N": 1}),
            Workload("n_8: shorter than a tile", {"M": 7, "N": 8, "factor": 1.0}),
            Workload("two_factors: of a power of two", {"M": 3, "N": 512}),
            Workload("paley_12: alone", {"M": 5, "N": 12}),
            Workload("paley_20: times two", {"M": 17, "N": 40, "factor": 0.5}),
            Workload("paley_28: times a power of two", {"M": 3, "N": 112}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            _bad("integers", "x is torch.int32", 4, 8, dtype=torch.int32),
            _bad("scalar", "no dimensions"),
            _bad("an odd factor", "the last dimension of x is 11; needs", 2, 11),
            _bad("no columns", "the last dimension of x is 0", 4, 0),
        ),
    )
)
