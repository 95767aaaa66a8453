"""The router of DeepSeek-V3: k experts of each token by sigmoid, a bias and groups of experts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.moe import routing, topk_softmax

EPSILON = 1e-20
"""Added to the sum by which weights are divided, as in the model."""


class TopkSigmoidArgs(NamedTuple):
    logits: Tensor  # (T, E)
    bias: Tensor | None  # (E,)
    k: int
    n_group: int
    topk_group: int
    renormalize: bool
    scale: float


class TopkSigmoidBackwardArgs(NamedTuple):
    dweights: Tensor  # (T, k)
    logits: Tensor  # (T, E)
    ids: Tensor  # (T, k) int64
    renormalize: bool
    scale: float


@dispatch("topk_sigmoid")
def topk_sigmoid(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights, ids) of the k experts of each token: s = sigmoid(logits) in float32; the k largest s + bias; their s,
    divided by their sum + 1e-20 if `renormalize`, times `scale`.

    logits: (T, E) bf16|fp16|fp32.   1 <= k <= E.   bias: (E,) (e_score_correction_bias), for the choice alone.
    n_group, topk_group: the E experts are n_group groups of neighbours; only those of the topk_group groups count
    whose two largest s + bias have the largest sum.   scale: routed_scaling_factor.
    weights: (T, k) fp32; ids: (T, k) int64, the largest s + bias first.  Equals, of experts and of groups, come by the
    lower number; the model's `torch.topk` leaves their order open, and that of the k ids (sorted=False).
    NaN counts as the largest.   Gradient of logits through the weights; the choice has none, so bias has none.
    backend: run on exactly this backend ("triton" up to 4096 experts and k = 64, "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, k out of range, E that n_group does not divide into groups of two or
    more, and topk_group groups with fewer than k experts.
    Source: DeepseekV3TopkRouter in transformers.
    """
    args = TopkSigmoidArgs(logits, bias, k, n_group, topk_group, renormalize, scale)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Plain torch; weights equal the model's bit for bit."""
    choice = _scores(logits.detach())
    if bias is not None:
        choice = choice + bias.detach()
    if n_group > 1:
        grouped = choice.unflatten(1, (n_group, -1))
        best = routing.largest(grouped.gather(2, routing.largest(grouped, 2)).sum(-1), topk_group)
        in_best = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        choice = torch.where(in_best[..., None], grouped, -torch.inf).flatten(1)
    ids = routing.largest(choice, k)
    return _weights(logits, ids, renormalize, scale), ids


def _scores(logits: Tensor) -> Tensor:
    return logits.to(rows.accumulate_dtype(logits.dtype)).sigmoid()


def _weights(logits: Tensor, ids: Tensor, renormalize: bool, scale: float) -> Tensor:
    chosen = _scores(logits).gather(1, ids)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + EPSILON)
    return chosen * scale


def _forward(args: TopkSigmoidArgs) -> tuple[Tensor, Tensor]:
    logits, bias, k, n_group, topk_group, renormalize, scale = args
    return reference(logits, k, bias=bias, n_group=n_group, topk_group=topk_group, renormalize=renormalize, scale=scale)


def _backward(args: TopkSigmoidBackwardArgs) -> Tensor:
    def forward(logits: Tensor) -> Tensor:
        return _weights(logits, args.ids, args.renormalize, args.scale)

    return vjp(forward, (args.logits,), (args.dweights,))[0]


FORWARD = RawOp(
    "topk_sigmoid",
    "fwd",
    TopkSigmoidArgs,
    package="tilewright.ops.moe",
    kernels=topk_softmax.KERNELS,
    outputs=routing.outputs,
    reference=_forward,
    bucket=routing.bucket,
    bucket_names=routing.RouterBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "topk_sigmoid",
    "bwd",
    TopkSigmoidBackwardArgs,
    package="tilewright.ops.moe",
    kernels=topk_softmax.KERNELS,
    outputs=lambda args: ((args.logits.shape, args.logits.dtype),),
    reference=_backward,
    bucket=lambda args: routing.RouterBucket(*rows.rows_bucket(args.logits), args.ids.shape[1]),
    bucket_names=routing.RouterBucket._fields,
)


def check(args: TopkSigmoidArgs) -> None:
    """Raise InputError for what the docstring of `topk_sigmoid` excludes."""
    op, k, n_group, topk_group = "topk_sigmoid", args.k, args.n_group, args.topk_group
    routing.check(op, args.logits, args.bias, k)
    experts = args.logits.shape[1]
    if n_group < 1 or experts % n_group or (n_group > 1 and experts // n_group < 2):
        raise InputError(f"{op}: n_group is {n_group}; {experts} experts need equal groups of at least two.")
    if not 1 <= topk_group <= n_group or topk_group * (experts // n_group) < k:
        raise InputError(
            f"{op}: topk_group is {topk_group}; needs 1 to n_group = {n_group} groups of {experts // n_group}, with at "
            f"least k = {k} experts together."
        )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, N experts, K (at most N), optional n_group and topk_group (where these groups can be),
    renormalize, scale, and those of `routing.random_logits`.
    """
    logits, bias = routing.random_logits(params, dtype, device, seed)
    options = {name: params[name] for name in ("n_group", "topk_group", "renormalize", "scale") if name in params}
    groups, size = params.get("n_group", 1), params["N"] // params.get("n_group", 1)
    if params["N"] % groups or size < 2 or params.get("topk_group", 1) * size < params["K"]:
        options = {name: value for name, value in options.items() if "group" not in name}
    return Sample((logits, min(params["K"], params["N"])), options if bias is None else {**options, "bias": bias})


def cost(sample: Sample, direction: str) -> Cost:
    """Costs what `topk_softmax` does."""
    return topk_softmax.cost(sample, direction)


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options})


_V3 = {"N": 256, "K": 8, "n_group": 8, "topk_group": 4, "scale": 2.5, "bias": True}


def _bad(name: str, match: str, k: int = 2, **options: Any) -> BadInput:
    return BadInput(name, lambda device: Sample((torch.ones(4, 8, device=device), k), options), match)


CONTRACT = register(
    Contract(
        name="topk_sigmoid",
        family="moe",
        summary="k experts of each token by sigmoid, bias and groups, with their weights",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("logits",),
            save=lambda args, outputs: (args.logits, outputs[1]),
            raw_args=lambda grads, saved, args, needs: TopkSigmoidBackwardArgs(
                grads[0], saved[0], saved[1], args.renormalize, args.scale
            ),
        ),
        workloads=(
            Workload("router_4096x384", {"M": 4096, "N": 384, "K": 8, "bias": True}, (torch.float32,)),
            Workload("deepseek_v3_4096", {"M": 4096, **_V3}, (torch.float32,)),
            Workload("decode_64", {"M": 64, **_V3}, (torch.float32,), ("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"M": 64, **_V3}, (torch.float32,)),),
        edge_cases=(
            _case("one_token: a single program", 1, 64, 4),
            _case("odd: the tail of a row is masked", 7, 60, 5, bias=True),
            _case("one_expert: its weight is 1", 5, 1, 1),
            _case("all: k of k", 3, 6, 6, scale=2.5),
            _case("plain: weights as they are", 6, 40, 4, renormalize=False, scale=0.5),
            _case("equal: ties by the lower id", 6, 50, 9, equal=True),
            _case("groups: two of five groups of seven", 6, 35, 4, n_group=5, topk_group=2, bias=True),
            _case("equal_groups: ties of groups by the lower number", 9, 24, 4, n_group=6, topk_group=3, equal=True),
            _case("empty: no tokens", 0, 64, 3),
        ),
        bad_inputs=(
            _bad("k of 0", "k is 0", k=0),
            _bad("k above E", "needs 1 <= k <= 8", k=9),
            _bad("groups that do not divide E", "n_group is 3", n_group=3),
            _bad("groups of one", "at least two", n_group=8, topk_group=4),
            _bad("more groups than there are", "topk_group is 3", n_group=2, topk_group=3),
            _bad("too few experts in the groups", "at least k = 3", k=3, n_group=4, topk_group=1),
            BadInput("a list of numbers for bias", lambda d: Sample((torch.ones(4, 8, device=d), 2), {"bias": [1.0]}),
                     "bias is a list"),
        ),
        edge_grid={"K": (1,), "n_group": (None,), "topk_group": (None,)},
    )
)  # fmt: skip
