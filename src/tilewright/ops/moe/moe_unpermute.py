"""Rows in the order of experts back to tokens: the weighted sum of each token's rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.moe import assignment
from tilewright.ops.moe.moe_permute import OrderBucket, order_bucket


class MoeUnpermuteArgs(NamedTuple):
    x: Tensor  # (T * k, H)
    weights: Tensor  # (T, k)
    slots: Tensor  # (T * k,) int32
    positions: Tensor  # (T, k) int32


class MoeUnpermuteBackwardArgs(NamedTuple):
    dy: Tensor  # (T, H)
    x: Tensor  # (T * k, H)
    weights: Tensor  # (T, k)
    slots: Tensor  # (T * k,) int32
    positions: Tensor  # (T, k) int32


@dispatch("moe_unpermute")
def moe_unpermute(
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y[t] = sum over j of weights[t, j] * x[positions[t, j]], in float32, the first expert's first, rounded once.

    x: (T * k, H) bf16|fp16|fp32, rows in the order of `moe_align`.   weights: (T, k) bf16|fp16|fp32.
    slots: (T * k,) int32 and positions: (T, k) int32, as `moe_align` makes them; a position of -1 adds nothing, and
    rows of dropped slots are not read.
    Returns (T, H) in x's dtype.   Gradients of x, 0 in rows of dropped slots, and of the weights, 0 of dropped slots.
    Nothing is added atomically: results and gradients repeat bit for bit.
    out: contiguous tensor to write instead of allocating; no gradient then.
    backend: run on exactly this backend ("triton" up to k = 64, "torch") or raise BackendError.
    Raises InputError for other dtypes and for shapes that do not fit.
    """
    result: Tensor = call(CONTRACT, MoeUnpermuteArgs(x, weights, slots, positions), backend, out)
    return result


def reference(x: Tensor, weights: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Plain torch."""
    return combined(x, weights, positions)


def combined(x: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """The weighted sum of the rows of each token."""
    is_local, dtype = positions >= 0, rows.accumulate_dtype(x.dtype)
    gathered = x[torch.where(is_local, positions, 0).to(torch.int64)].to(dtype)
    return torch.where(is_local[..., None], gathered * weights.to(dtype)[..., None], 0).sum(1).to(x.dtype)


def _backward(args: MoeUnpermuteBackwardArgs) -> tuple[Tensor, Tensor]:
    dx, dweights = vjp(lambda x, w: combined(x, w, args.positions), (args.x, args.weights), (args.dy,))
    return dx, dweights


KERNELS = ("triton.moe_unpermute",)

FORWARD = RawOp(
    "moe_unpermute",
    "fwd",
    MoeUnpermuteArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=lambda args: (((args.positions.shape[0], args.x.shape[1]), args.x.dtype),),
    reference=lambda args: combined(args.x, args.weights, args.positions),
    bucket=lambda args: order_bucket(args.x.shape[1], args.positions),
    bucket_names=OrderBucket._fields,
    out=True,
)
BACKWARD = RawOp(
    "moe_unpermute",
    "bwd",
    MoeUnpermuteBackwardArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=lambda args: ((args.x.shape, args.x.dtype), (args.weights.shape, args.weights.dtype)),
    reference=_backward,
    bucket=lambda args: order_bucket(args.x.shape[1], args.positions),
    bucket_names=OrderBucket._fields,
    count=2,
)


def check(args: MoeUnpermuteArgs) -> None:
    """Raise InputError for what the docstring of `moe_unpermute` excludes."""
    op = "moe_unpermute"
    rows.check_floating(op, x=args.x, weights=args.weights)
    assignment.check_order(op, args.slots, args.positions, args.x.device)
    if args.x.dim() != 2 or args.x.shape[0] != args.slots.shape[0]:
        raise InputError(f"{op}: x is {tuple(args.x.shape)}; needs ({args.slots.shape[0]}, H), a row for each slot.")
    if args.weights.shape != args.positions.shape:
        raise InputError(
            f"{op}: weights is {tuple(args.weights.shape)}; needs {tuple(args.positions.shape)} as positions."
        )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, N columns, E experts, K experts a token, and those of `assignment.random_ids`; optional
    weights (their dtype, by default float32).
    """
    ids = assignment.random_ids(params, torch.int64, device, seed)
    g = rows.generator(seed + 1)
    x = rows.random_tensor((ids.numel(), params["N"]), dtype, device, g)
    weights = rows.random_tensor(tuple(ids.shape), params.get("weights", torch.float32), device, g)
    return Sample((x, weights, *assignment.order_of(ids, params["E"])))


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads k rows for each that it writes.  Backward reads dy and x, writes dx."""
    x, weights, slots, positions = sample.args
    once, order = positions.shape[0] * x.shape[1] * x.element_size(), rows.nbytes(positions, weights)
    if direction == "fwd":
        return Cost(2 * x.numel(), rows.nbytes(x) + order, once)
    return Cost(3 * x.numel(), once + rows.nbytes(x, slots) + order, rows.nbytes(x, weights))


def _case(name: str, m: int, n: int, e: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "E": e, "K": k, **options})


def _bad(name: str, match: str, x: Any = (6, 8), weights: Any = (3, 2), slots: int = 6, **options: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        ints = options.get("ints", torch.int32)
        order = torch.arange(slots, device=device).to(ints), torch.zeros(3, 2, dtype=ints, device=device)
        return Sample((torch.ones(x, device=device), torch.ones(weights, device=device), *order))

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="moe_unpermute",
        family="moe",
        summary="the weighted sum of each token's rows, from the order of experts",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "weights"),
            save=lambda args, outputs: tuple(args),
            raw_args=lambda grads, saved, args, needs: MoeUnpermuteBackwardArgs(grads[0], *saved),
        ),
        workloads=(_case("4096x7168_k8", 4096, 7168, 128, 8), _case("8192x2048_k8", 8192, 2048, 128, 8)),
        cpu_workloads=(_case("small", 64, 256, 16, 4),),
        edge_cases=(
            _case("odd: the tail of a row is masked", 5, 77, 9, 3),
            _case("one_token: one row of k", 1, 64, 8, 4),
            _case("k_1: a permutation, scaled", 9, 40, 4, 1),
            _case("dropped: rows that are not read", 11, 48, 6, 3, dropped=True),
            _case("parts: a row divided among programs", 4, 4100, 5, 2),
            _case("bf16_weights: as Qwen3-MoE has them", 6, 64, 5, 3, weights=torch.bfloat16),
            _case("n_1: one column", 6, 1, 4, 2),
            _case("empty: no tokens", 0, 64, 8, 2),
        ),
        bad_inputs=(
            _bad("a vector", r"x is \(6,\)", x=(6,)),
            _bad("too few rows", r"needs \(6, H\)", x=(5, 8)),
            _bad("slots of 64 bits", "slots is .* torch.int64", ints=torch.int64),
            _bad("too few slots", "must agree", slots=5),
            _bad("weights of others", r"weights is \(2, 2\); needs \(3, 2\)", weights=(2, 2)),
        ),
        batch_dim=None,
        edge_grid={"K": (1,), "weights": (None, torch.bfloat16)},
    )
)
