"""The k largest elements of each row."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint
from tilewright.dispatch.targets import several
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.sampling import checks


class TopKArgs(NamedTuple):
    x: Tensor  # (M, N)
    k: int


class TopKBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    K: int


@dispatch("top_k")
def top_k(
    x: Tensor, k: int, *, out: tuple[Tensor, Tensor] | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest elements of each row, the largest first, equals by the lower index first.

    x: (M, N) bf16|fp16|fp32, N <= 2^22; the last stride is 1, another costs a copy.   1 <= k <= N.
    values: (M, k) in x's dtype, with x's bits; indices: (M, k) int64.
    NaN counts as larger than +inf, as in torch; -0.0 and 0.0 are equal.   `torch.topk` leaves the order of equals open.
    out: (values, indices), contiguous memory to write instead of allocating.
    There is no gradient: x.gather(1, indices) has one.
    backend: run on exactly this backend ("cuda" with k <= 2048, "triton" with k <= 256, "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, k out of range, and x that requires a gradient.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, TopKArgs(x, k), backend, several(out, 2, 2))
    return result if out is None else out


def reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Plain torch: a stable sort, of one NaN alone, because on a GPU its order of NaN is that of their bits."""
    keys = torch.where(x.isnan(), torch.nan, x)
    indices = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    return x.gather(1, indices), indices


FORWARD = RawOp(
    "top_k",
    "fwd",
    TopKArgs,
    package="tilewright.ops.sampling",
    kernels=("sm90.top_k_short", "sm90.top_k", "triton.top_k"),
    outputs=lambda args: (
        ((args.x.shape[0], args.k), args.x.dtype),
        ((args.x.shape[0], args.k), torch.int64),
    ),
    reference=lambda args: reference(args.x, args.k),
    bucket=lambda args: TopKBucket(*rows.rows_bucket(args.x), hint(args.k)),
    bucket_names=TopKBucket._fields,
    count=2,
    out=True,
)


def check(args: TopKArgs) -> None:
    """Raise InputError for what the docstring of `top_k` excludes."""
    checks.check_rows("top_k", "x", args.x, "(M, N)")
    if not 1 <= args.k <= args.x.shape[1]:
        raise InputError(f"top_k: k is {args.k}; x is {tuple(args.x.shape)}, needs 1 <= k <= {args.x.shape[1]}.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K (at most N); special: ties, NaN, infinities; equal: integers, of which many are alike."""
    x = checks.logits(params["M"], params["N"], dtype, device, seed)
    if params.get("equal"):
        x = x.round()
    if params.get("special"):
        checks.spoil(x)
    return Sample((x, min(params["K"], params["N"])))


def cost(sample: Sample, direction: str) -> Cost:
    """A comparison an element; reads x, writes k values and indices a row."""
    x, k = sample.args
    return Cost(x.numel(), rows.nbytes(x), x.shape[0] * k * (x.element_size() + 8))


def _bad(name: str, k: int, match: str) -> BadInput:
    return BadInput(name, lambda d: Sample((torch.ones(4, 8, device=d), k)), match)


CONTRACT = register(
    Contract(
        name="top_k",
        family="sampling",
        summary="the k largest elements of each row, ordered, ties by the lower index",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=tuple(
            Workload(f"rows_{m}x{n}_k{k}", {"M": m, "N": n, "K": k}, (torch.bfloat16, torch.float32), ("fwd",))
            for m, n, k in ((1, 131072, 20), (128, 131072, 20), (128, 131072, 64), (4096, 256, 8), (4096, 384, 8))
        ),
        cpu_workloads=(Workload("small", {"M": 16, "N": 32000, "K": 20}, (torch.float32,), ("fwd",)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256, "K": 5}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333, "K": 10}),
            Workload("n_1: one element", {"M": 5, "N": 1, "K": 1}),
            Workload("all: a stable sort", {"M": 3, "N": 37, "K": 37}),
            Workload("levels: parts, and parts of their results", {"M": 2, "N": 9001, "K": 64}),
            Workload("equal: ties by the lower index", {"M": 4, "N": 700, "K": 33, "equal": True}),
            Workload("special: NaN, infinities, little else", {"M": 6, "N": 60, "K": 50, "special": True}),
            Workload("empty: no rows", {"M": 0, "N": 64, "K": 3}),
        ),
        bad_inputs=(
            _bad("k of 0", 0, "k is 0"),
            _bad("k above N", 9, "needs 1 <= k <= 8"),
            BadInput("integers", lambda d: Sample((torch.ones(4, 8, dtype=torch.int32, device=d), 2)), "torch.int32"),
            BadInput("no elements", lambda d: Sample((torch.ones(4, 0, device=d), 1)), "may be 1 to"),
            BadInput("vector", lambda d: Sample((torch.ones(8, device=d), 2)), r"needs \(M, N\)"),
        ),
        edge_grid={"K": (1,)},
    )
)
