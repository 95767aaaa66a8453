"""The router of Mixtral, Qwen-MoE and OLMoE: k experts of each token by softmax."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Gradient, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.ops import rows
from tilewright.ops.moe import routing


class TopkSoftmaxArgs(NamedTuple):
    logits: Tensor  # (T, E)
    bias: Tensor | None  # (E,)
    k: int
    renormalize: bool


class TopkSoftmaxBackwardArgs(NamedTuple):
    dweights: Tensor  # (T, k)
    logits: Tensor  # (T, E)
    ids: Tensor  # (T, k) int64
    renormalize: bool


@dispatch("topk_softmax")
def topk_softmax(
    logits: Tensor, k: int, *, renormalize: bool = True, bias: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, ids) of the k experts of each token: p = softmax(logits) in float32, the k largest, divided by their
    sum if `renormalize`.

    logits: (T, E) bf16|fp16|fp32.   1 <= k <= E.   bias: (E,), added to p for the choice alone, not to the weights.
    weights: (T, k) fp32, a model that works on in bf16 casts them; ids: (T, k) int64, the largest first.
    Equals come by the lower id.  `torch.topk`, which the models call on p, leaves the order of equals open; where
    logits differ and their p are equal after rounding, the larger logit comes first (with a bias: the lower id).
    NaN counts as the largest.   Gradient of logits through the weights; the choice has none, so bias has none.
    backend: run on exactly this backend ("triton" up to 4096 experts and k = 64, "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, and k out of range.
    Source: Mixtral's, Qwen3-MoE's (norm_topk_prob) and OLMoE's routers in transformers.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, TopkSoftmaxArgs(logits, bias, k, renormalize), backend)
    return result


def reference(logits: Tensor, k: int, *, renormalize: bool = True, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Plain torch; weights equal the models' bit for bit."""
    choice = logits.detach()
    if bias is not None:
        choice = _probabilities(choice) + bias.detach()
    ids = routing.largest(choice, k)
    return _weights(logits, ids, renormalize), ids


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1, dtype=rows.accumulate_dtype(logits.dtype))


def _weights(logits: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    chosen = _probabilities(logits).gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen


def _forward(args: TopkSoftmaxArgs) -> tuple[Tensor, Tensor]:
    return reference(args.logits, args.k, renormalize=args.renormalize, bias=args.bias)


def _backward(args: TopkSoftmaxBackwardArgs) -> Tensor:
    return vjp(lambda logits: _weights(logits, args.ids, args.renormalize), (args.logits,), (args.dweights,))[0]


KERNELS = ("triton.routing",)

FORWARD = RawOp(
    "topk_softmax",
    "fwd",
    TopkSoftmaxArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=routing.outputs,
    reference=_forward,
    bucket=routing.bucket,
    bucket_names=routing.RouterBucket._fields,
    count=2,
)
BACKWARD = RawOp(
    "topk_softmax",
    "bwd",
    TopkSoftmaxBackwardArgs,
    package="tilewright.ops.moe",
    kernels=KERNELS,
    outputs=lambda args: ((args.logits.shape, args.logits.dtype),),
    reference=_backward,
    bucket=lambda args: routing.RouterBucket(*rows.rows_bucket(args.logits), args.ids.shape[1]),
    bucket_names=routing.RouterBucket._fields,
)


def check(args: TopkSoftmaxArgs) -> None:
    """Raise InputError for what the docstring of `topk_softmax` excludes."""
    routing.check("topk_softmax", args.logits, args.bias, args.k)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, N experts, K (at most N), optional renormalize, and those of `routing.random_logits`."""
    logits, bias = routing.random_logits(params, dtype, device, seed)
    options = {"renormalize": params["renormalize"]} if "renormalize" in params else {}
    return Sample((logits, min(params["K"], params["N"])), options if bias is None else {**options, "bias": bias})


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads the logits and writes k weights and ids a token.  Backward reads all of these, writes dlogits."""
    logits, k = sample.args
    chosen = logits.shape[0] * k
    if direction == "fwd":
        return Cost(6 * logits.numel(), rows.nbytes(logits), 12 * chosen)
    return Cost(6 * logits.numel(), rows.nbytes(logits) + 12 * chosen, rows.nbytes(logits))


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options})


def _bad(name: str, match: str, shape: tuple[int, ...] = (4, 8), k: int = 2, **options: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        dtype = options.get("dtype", torch.float32)
        kwargs = {"bias": torch.ones(options["bias"], device=device)} if "bias" in options else {}
        return Sample((torch.ones(shape, device=device, dtype=dtype), k), kwargs)

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="topk_softmax",
        family="moe",
        summary="k experts of each token by softmax, with their weights",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("logits",),
            save=lambda args, outputs: (args.logits, outputs[1]),
            raw_args=lambda grads, saved, args, needs: TopkSoftmaxBackwardArgs(
                grads[0], saved[0], saved[1], args.renormalize
            ),
        ),
        workloads=(
            Workload("qwen3_30b_4096", {"M": 4096, "N": 128, "K": 8}, (torch.bfloat16, torch.float32)),
            Workload("router_4096x384", {"M": 4096, "N": 384, "K": 8}, (torch.float32,)),
            Workload("mixtral_8192", {"M": 8192, "N": 8, "K": 2}, (torch.bfloat16,)),
            Workload("decode_64", {"M": 64, "N": 128, "K": 8}, (torch.bfloat16,), ("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"M": 64, "N": 128, "K": 8}, (torch.float32,)),),
        edge_cases=(
            _case("one_token: a single program", 1, 64, 4),
            _case("odd: the tail of a row is masked", 7, 60, 5),
            _case("mixtral: 2 of 8", 9, 8, 2),
            _case("one_expert: its weight is 1", 5, 1, 1),
            _case("all: k of k", 3, 6, 6),
            _case("plain: weights that do not sum to 1", 6, 40, 4, renormalize=False),
            _case("equal: ties by the lower id", 6, 50, 9, equal=True),
            _case("bias: the choice is not the order of weights", 6, 33, 4, bias=True),
            _case("empty: no tokens", 0, 64, 3),
        ),
        bad_inputs=(
            _bad("k of 0", "k is 0", k=0),
            _bad("k above E", "needs 1 <= k <= 8", k=9),
            _bad("integers", "logits is torch.int32", dtype=torch.int32),
            _bad("a vector", r"needs \(T, E\)", shape=(8,)),
            _bad("no experts", "at least one expert", shape=(4, 0)),
            _bad("bias of another length", r"bias is \(7,\)", bias=(7,)),
        ),
        edge_grid={"K": (1,)},
    )
)
