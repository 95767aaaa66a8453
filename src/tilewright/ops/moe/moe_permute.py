"""Rows of tokens in the order of their experts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.moe import assignment


class MoePermuteArgs(NamedTuple):
    x: Tensor  # (T, H)
    slots: Tensor  # (T * k,) int32
    positions: Tensor  # (T, k) int32


class MoePermuteBackwardArgs(NamedTuple):
    dy: Tensor  # (T * k, H)
    positions: Tensor  # (T, k) int32


class OrderBucket(NamedTuple):
    T: int  # rounded up to a power of two
    K: int
    H: int


@dispatch("moe_permute")
def moe_permute(
    x: Tensor, slots: Tensor, positions: Tensor, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """y[r] = x[slots[r] // k]: each token's row once for each of its experts, in the order of `moe_align`.

    x: (T, H) bf16|fp16|fp32.   slots: (T * k,) int32 and positions: (T, k) int32, as `moe_align` makes them.
    Returns (T * k, H) in x's dtype; rows of dropped slots, which are last, are 0.
    Gradient: dx[t] is the sum of dy over the rows of token t, in float32, the first expert's first, rounded once.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton" up to k = 64, "torch") or raise BackendError.
    Raises InputError for other dtypes and for shapes that do not fit.
    """
    result: Tensor = call(CONTRACT, MoePermuteArgs(x, slots, positions), backend, out)
    return result


def reference(x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Plain torch: a gather."""
    k = max(1, positions.shape[1])
    is_local = positions.flatten()[slots.to(torch.int64)] >= 0
    return torch.where(is_local[:, None], x[slots.to(torch.int64) // k], 0)


def summed(dy: Tensor, positions: Tensor) -> Tensor:
    """The sum of the rows of each token, in float32, rounded once."""
    is_local = positions >= 0
    gathered = dy[torch.where(is_local, positions, 0).to(torch.int64)].to(rows.accumulate_dtype(dy.dtype))
    return torch.where(is_local[..., None], gathered, 0).sum(1).to(dy.dtype)


FORWARD = RawOp(
    "moe_permute",
    "fwd",
    MoePermuteArgs,
    package="tilewright.ops.moe",
    kernels=("triton.moe_permute",),
    outputs=lambda args: (((args.slots.shape[0], args.x.shape[1]), args.x.dtype),),
    reference=lambda args: reference(*args),
    bucket=lambda args: order_bucket(args.x.shape[1], args.positions),
    bucket_names=OrderBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "moe_permute",
    "bwd",
    MoePermuteBackwardArgs,
    package="tilewright.ops.moe",
    kernels=("triton.moe_permute",),
    outputs=lambda args: (((args.positions.shape[0], args.dy.shape[1]), args.dy.dtype),),
    reference=lambda args: summed(args.dy, args.positions),
    bucket=lambda args: order_bucket(args.dy.shape[1], args.positions),
    bucket_names=OrderBucket._fields,
)


def order_bucket(width: Any, positions: Tensor) -> OrderBucket:
    """The bucket of rows of `width` in the order of `positions` (T, k)."""
    return OrderBucket(row_bucket(positions.shape[0]), hint(positions.shape[1]), max(1, hint(width)))


def check(args: MoePermuteArgs) -> None:
    """Raise InputError for what the docstring of `moe_permute` excludes."""
    op = "moe_permute"
    rows.check_floating(op, x=args.x)
    if args.x.dim() != 2:
        raise InputError(f"{op}: x is {tuple(args.x.shape)}; needs (T, H).")
    assignment.check_order(op, args.slots, args.positions, args.x.device)
    if args.positions.shape[0] != args.x.shape[0]:
        raise InputError(
            f"{op}: positions is {tuple(args.positions.shape)}, x is {tuple(args.x.shape)}; they must agree in T."
        )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, N columns, E experts, K experts a token, and those of `assignment.random_ids`."""
    order = assignment.order_of(assignment.random_ids(params, torch.int64, device, seed), params["E"])
    x = rows.random_tensor((params["M"], params["N"]), dtype, device, rows.generator(seed + 1))
    return Sample((x, *order))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads x and writes k rows for each of it, an operation an element; backward the other way."""
    x, slots, positions = sample.args
    once, often = rows.nbytes(x), x.shape[1] * slots.shape[0] * x.element_size()
    if direction == "fwd":
        return Cost(x.shape[1] * slots.shape[0], once + rows.nbytes(slots, positions), often)
    return Cost(x.shape[1] * slots.shape[0], often + rows.nbytes(positions), once)


def _case(name: str, m: int, n: int, e: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "E": e, "K": k, **options})


def _bad(name: str, match: str, x: Any = (3, 8), slots: Any = 6, positions: Any = (3, 2), **options: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        ints = options.get("ints", torch.int32)
        numbers = torch.arange(slots, device=device).to(ints)
        return Sample((torch.ones(x, device=device), numbers, torch.zeros(positions, dtype=ints, device=device)))

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="moe_permute",
        family="moe",
        summary="rows of tokens in the order of their experts",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x",),
            save=lambda args, outputs: (args.positions,),
            raw_args=lambda grads, saved, args, needs: MoePermuteBackwardArgs(grads[0], *saved),
        ),
        workloads=(_case("4096x7168_k8", 4096, 7168, 128, 8), _case("8192x2048_k8", 8192, 2048, 128, 8)),
        cpu_workloads=(_case("small", 64, 256, 16, 4),),
        edge_cases=(
            _case("odd: the tail of a row is masked", 5, 77, 9, 3),
            _case("one_token: k rows", 1, 64, 8, 4),
            _case("k_1: a permutation", 9, 40, 4, 1),
            _case("dropped: rows of zeros at the end", 11, 48, 6, 3, dropped=True),
            _case("parts: a row divided among programs", 4, 4100, 5, 2),
            _case("n_1: one column", 6, 1, 4, 2),
            _case("empty: no tokens", 0, 64, 8, 2),
        ),
        bad_inputs=(
            _bad("a vector", r"x is \(3,\); needs \(T, H\)", x=(3,)),
            _bad("slots of 64 bits", "slots is .* torch.int64", ints=torch.int64),
            _bad("too few slots", "must agree", slots=5),
            _bad("other tokens", "agree in T", x=(4, 8)),
        ),
        batch_dim=None,
        edge_grid={"K": (1,)},
    )
)
