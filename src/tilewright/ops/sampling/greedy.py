"""The likeliest token of each row."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.sampling import checks
from tilewright.ops.sampling.numbers import clean


class GreedyArgs(NamedTuple):
    logits: Tensor  # (B, V)


@dispatch("greedy")
def greedy(logits: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """tokens[b] = argmax_v logits[b, v], the first of equals.

    logits: (B, V) bf16|fp16|fp32, V <= 2^22; the last stride is 1, another costs a copy.   Returns (B,) int64.
    NaN counts as -inf, so that a broken logit is never chosen; a row without a logit above -inf gives -1.
    It is the token that `sample` takes at temperature 0.  There is no gradient.
    out: contiguous (B,) int64 to write instead of allocating.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, and for logits that require a gradient.
    """
    result: Tensor = call(CONTRACT, GreedyArgs(logits), backend, out)
    return result


def reference(logits: Tensor) -> Tensor:
    """Plain torch, in float32."""
    x = clean(logits)
    values, tokens = x.max(-1)
    first = torch.where(x == values[:, None], torch.arange(x.shape[1], device=x.device), x.shape[1]).amin(-1)
    return torch.where(values > -torch.inf, first, torch.full_like(tokens, -1))


FORWARD = RawOp(
    "greedy",
    "fwd",
    GreedyArgs,
    package="tilewright.ops.sampling",
    kernels=("sm90.greedy", "triton.greedy"),
    outputs=lambda args: (((args.logits.shape[0],), torch.int64),),
    reference=lambda args: reference(args.logits),
    bucket=lambda args: rows.rows_bucket(args.logits),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)


def check(args: GreedyArgs) -> None:
    """Raise InputError for what the docstring of `greedy` excludes."""
    checks.check_rows("greedy", "logits", args.logits)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N tokens; special: rows with ties, NaN, infinities, and nothing."""
    x = checks.logits(params["M"], params["N"], dtype, device, seed)
    if params.get("special"):
        checks.spoil(x)
    return Sample((x,))


def cost(sample: Sample, direction: str) -> Cost:
    """A comparison an element; reads the logits."""
    (x,) = sample.args
    return Cost(x.numel(), rows.nbytes(x), 8 * x.shape[0])


CONTRACT = register(
    Contract(
        name="greedy",
        family="sampling",
        summary="the likeliest token of each row",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=tuple(
            Workload(f"vocabulary_{m}x{n}", {"M": m, "N": n}, (torch.bfloat16, torch.float32), ("fwd",))
            for m, n in ((1, 131072), (32, 128256), (128, 131072))
        ),
        cpu_workloads=(Workload("small", {"M": 16, "N": 32000}, (torch.float32,), ("fwd",)),),
        edge_cases=(
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the tail of a row is masked", {"M": 7, "N": 333}),
            Workload("n_1: one token", {"M": 5, "N": 1}),
            Workload("parts: a row divided among programs", {"M": 3, "N": 9001}),
            Workload("special: ties, NaN, infinities, nothing", {"M": 6, "N": 300, "special": True}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            BadInput("integers", lambda d: Sample((torch.ones(4, 8, dtype=torch.int32, device=d),)), "torch.int32"),
            BadInput("vector", lambda d: Sample((torch.ones(8, device=d),)), r"needs \(B, V\)"),
            BadInput("no tokens", lambda d: Sample((torch.ones(4, 0, device=d),)), "may be 1 to"),
        ),
    )
)
