"""The norm of all elements of a tensor: what clipping needs of each gradient."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows

OP = "grad_norm"


class GradNormArgs(NamedTuple):
    x: Tensor  # any shape
    norm_type: float


class GradNormBucket(NamedTuple):
    N: int  # elements, rounded up to a power of two


@dispatch(OP)
def grad_norm(x: Tensor, *, norm_type: float = 2.0, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """(sum of |x|^p)^(1/p) over all elements, p = norm_type; the largest |x| for infinity.

    x: bf16|fp16|fp32 of any shape; one that does not fill a run of memory costs a copy.   Returns () float32.
    norm_type: 1, 2 or infinity.   NaN anywhere gives NaN.   Without elements the norm is 0.

    Sums are float32, of parts and then of their sums, in one order whatever the GPU: the same bits in every run.  A sum
    of squares beyond 3.4e38 is infinite.   A gradient is computed by torch.
    out: () float32 to write instead of allocating.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and other norms.
    """
    result: Tensor = call(CONTRACT, GradNormArgs(x, norm_type), backend, out)
    return result


def reference(x: Tensor, *, norm_type: float = 2.0) -> Tensor:
    """Plain torch, in float32."""
    if not x.numel():
        return x.sum(dtype=rows.accumulate_dtype(x.dtype))
    result: Tensor = torch.linalg.vector_norm(x.to(rows.accumulate_dtype(x.dtype)), norm_type)
    return result


FORWARD = RawOp(
    OP,
    "fwd",
    GradNormArgs,
    package="tilewright.ops.optim",
    kernels=("triton.grad_norm",),
    outputs=lambda args: (((), rows.accumulate_dtype(args.x.dtype)),),
    reference=lambda args: reference(args.x, norm_type=args.norm_type),
    bucket=lambda args: GradNormBucket(row_bucket(args.x.numel())),
    bucket_names=GradNormBucket._fields,
    batch_fields=(),
    out=True,
)


def check(args: GradNormArgs) -> None:
    """Raise InputError for what the docstring of `grad_norm` excludes."""
    if not isinstance(args.x, Tensor):
        raise InputError(f"{OP}: x is a {type(args.x).__name__}; needs a torch.Tensor.")
    if args.x.dtype not in rows.FLOATS:
        raise InputError(f"{OP}: x is {args.x.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    if args.norm_type not in (1.0, 2.0, float("inf")):
        raise InputError(f"{OP}: norm_type is {args.norm_type}; needs 1, 2 or infinity.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: N elements, or shape; norm_type; permuted (dimensions of memory reversed), strided (every second one)."""
    shape = tuple(params.get("shape", (params.get("N", 0),)))
    rng = rows.generator(seed)
    if params.get("strided"):
        x = rows.random_tensor((*shape[:-1], 2 * shape[-1]), dtype, device, rng)[..., ::2]
    elif params.get("permuted"):
        x = rows.random_tensor(shape[::-1], dtype, device, rng).permute(*range(len(shape))[::-1])
    else:
        x = rows.random_tensor(shape, dtype, device, rng)
    return Sample((x,), {name: params[name] for name in ("norm_type",) if name in params})


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations an element; reads them, writes one number."""
    x = sample.args[0]
    return Cost(2 * x.numel(), rows.nbytes(x), 4)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        x = torch.ones(4, dtype=changes.get("dtype", torch.float32), device=device)
        return Sample((x,), {k: v for k, v in changes.items() if k == "norm_type"})

    return BadInput(name, make, match)


_PRECISIONS = (torch.bfloat16, torch.float32)
CONTRACT = register(
    Contract(
        name=OP,
        family="optim",
        summary="the norm of a gradient, for clipping",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            Workload("llama8b_up", {"shape": (14336, 4096)}, _PRECISIONS, ("fwd",)),
            Workload("llama8b_norm", {"N": 4096}, _PRECISIONS, ("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"shape": (512, 512)}, _PRECISIONS, ("fwd",)),),
        edge_cases=(
            Workload("odd_n: the tail of a block", {"N": 257}, directions=("fwd",)),
            Workload("sum: of magnitudes", {"N": 9001, "norm_type": 1.0}, directions=("fwd",)),
            Workload("largest: of magnitudes", {"N": 3000, "norm_type": float("inf")}, directions=("fwd",)),
            Workload("parts: of several programs", {"N": 17001}, directions=("fwd",)),
            Workload("permuted: dense, in another order", {"shape": (3, 5, 7), "permuted": True}, directions=("fwd",)),
            Workload("strided: every second column", {"shape": (6, 9), "strided": True}, directions=("fwd",)),
            Workload("one: a scalar", {"shape": ()}, directions=("fwd",)),
            Workload("empty: no elements", {"N": 0}, directions=("fwd",)),
        ),
        bad_inputs=(
            _bad("integers", "x is torch.int32", dtype=torch.int32),
            _bad("cubes", "norm_type is 3.0; needs 1, 2 or infinity", norm_type=3.0),
        ),
        batch_dim=None,  # one number of all elements
    )
)
