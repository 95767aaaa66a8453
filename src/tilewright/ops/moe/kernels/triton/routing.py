"""topk_softmax and topk_sigmoid in Triton: one warp takes some rows and keeps them in registers.

k rounds of a maximum: the largest key, then the lowest index that has it, both by integer reductions, for which a warp
has an instruction.  A key is the float32 as an integer of the same order; a taken expert gets the least one.  The k
weights are computed again from the k logits, which the cache still holds, so no round moves a weight.
exp and the division are those of torch's CUDA kernels, so that equal scores are equal here too.

Traffic: the logits once, 12 bytes for each of the k; 4096 x 384 in float32 are 6.7 MB, 1.6 us at 4.2 TB/s, and the
rounds take longer.  The backward is, for w = p / sum(p of the chosen): dlogit = w (dw - sum(dw w)) for the chosen; for
w = p: p (dw - sum(dw p)); for w = scale s / sum: scale s (1 - s) (dw - sum(dw s) / sum) / sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.moe import topk_sigmoid, topk_softmax
from tilewright.ops.moe.routing import MOST_EXPERTS, RouterBucket
from tilewright.ops.moe.topk_sigmoid import TopkSigmoidArgs, TopkSigmoidBackwardArgs
from tilewright.ops.moe.topk_softmax import TopkSoftmaxArgs, TopkSoftmaxBackwardArgs
from tilewright.ops.rows import as_rows, no_float64
from tilewright.ops.sampling.kernels.triton.numbers import ordered, value

MOST_CHOSEN = 64
CHUNK, MOST_CHUNKS = 128, 8  # experts that a row is padded to a multiple of, while it has few
TAKEN = tl.constexpr(-2147483648)
LARGEST = tl.constexpr(2147483647)
EPSILON = tl.constexpr(topk_sigmoid.EPSILON)


class Config(NamedTuple):
    """block_m: rows of a program."""

    block_m: int
    num_warps: int


CONFIGS = (Config(1, 1), Config(4, 4))


def configure(bucket: RouterBucket, dtype: torch.dtype) -> Config:
    """Chooses a warp a row.  Four warps share a program where rows are short enough that Triton gives each one of
    them: 4096 x 128 in bf16 take 4.2 us, 4.8 with a program a row (H100, 2026-11).
    """
    return CONFIGS[1] if bucket.N <= 128 and bucket.M > 1024 else CONFIGS[0]


def candidates(bucket: RouterBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(Config(m, warps) for m, warps in ((1, 1), (2, 1), (4, 1), (4, 4), (8, 4)) if m * bucket.N <= 2048)


@triton.jit
def _probabilities(x, peak, total):
    return tl.div_rn(libdevice.exp(x - peak), total)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))


@triton.jit
def _key(choice, inside):
    """int32 in the order of `choice`, NaN the largest; the least where not `inside`."""
    return tl.where(inside, tl.where(choice == choice, ordered(choice), LARGEST), TAKEN)


@triton.jit
def _first_largest(key, index):
    """Along the last dimension: the lowest index of the largest key."""
    axis: tl.constexpr = len(key.shape) - 1
    return tl.min(tl.where(key == tl.max(key, axis, keep_dims=True), index, LARGEST), axis, keep_dims=True)


@triton.jit
def _first_largest_of(keys, place, CHUNKS: tl.constexpr):
    """The same of a row in chunks (BLOCK_M, BLOCK) of keys; chunk c begins at place c * BLOCK."""
    BLOCK: tl.constexpr = place.shape[1]
    most = keys[0]
    for c in tl.static_range(1, CHUNKS):
        most = tl.maximum(most, keys[c])
    most = tl.max(most, 1, keep_dims=True)
    first = tl.where(keys[0] == most, place, LARGEST)
    for c in tl.static_range(1, CHUNKS):
        first = tl.minimum(first, tl.where(keys[c] == most, place + c * BLOCK, LARGEST))
    return tl.min(first, 1, keep_dims=True)


@triton.jit
def _within_groups(
    key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """key (BLOCK_M, BLOCK_G * BLOCK_S), with the least one outside of the best groups."""
    grouped = tl.reshape(key, (BLOCK_M, BLOCK_G, BLOCK_S))
    place = tl.arange(0, BLOCK_S)[None, None, :]
    best = tl.max(grouped, 2)
    second = tl.max(tl.where(place == _first_largest(grouped, place), TAKEN, grouped), 2)
    group = tl.arange(0, BLOCK_G)[None, :]
    group_key = _key(value(best) + value(second), group < GROUPS)  # (BLOCK_M, BLOCK_G)
    in_best = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        chosen = group == _first_largest(group_key, group)
        in_best = in_best | chosen
        group_key = tl.where(chosen, TAKEN, group_key)
    in_best = tl.broadcast_to(in_best[:, :, None], (BLOCK_M, BLOCK_G, BLOCK_S))
    return tl.reshape(tl.where(in_best, grouped, TAKEN), (BLOCK_M, BLOCK_G * BLOCK_S))


@triton.jit
def _expert(place, c, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_S: tl.constexpr, CHUNKS: tl.constexpr):
    """(experts at these places of chunk c, whether there are such)"""
    if GROUPS > 1:
        return place // BLOCK_S * SIZE + place % BLOCK_S, (place < GROUPS * BLOCK_S) & (place % BLOCK_S < SIZE)
    return place + c * BLOCK_S, place + c * BLOCK_S < SIZE


@triton.jit
def _route_kernel(
    weights, ids, logits, bias, T, stride, scale,  # weights, ids: (T, K)  logits: (T, GROUPS * SIZE)
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    logits += row.to(tl.int64) * stride
    place = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]  # groups are padded to BLOCK_S; one group comes in chunks

    # Load the row, and sum its exponentials
    xs = ()
    for c in tl.static_range(CHUNKS):
        expert, inside = _expert(place, c, GROUPS, SIZE, BLOCK_S, CHUNKS)
        xs += (tl.load(logits + expert, mask=inside & (row < T), other=float("-inf")).to(tl.float32),)
    if not SIGMOID:
        peak = xs[0]
        for c in tl.static_range(1, CHUNKS):
            peak = tl.maximum(peak, xs[c])
        peak = tl.max(peak, 1, keep_dims=True)
        total = libdevice.exp(xs[0] - peak)
        for c in tl.static_range(1, CHUNKS):
            total += libdevice.exp(xs[c] - peak)
        total = tl.sum(total, 1, keep_dims=True)

    # What the choice goes by
    keys = ()
    for c in tl.static_range(CHUNKS):
        expert, inside = _expert(place, c, GROUPS, SIZE, BLOCK_S, CHUNKS)
        choice = xs[c]
        if SIGMOID:
            choice = _sigmoid(choice)
        elif bias is not None:
            choice = _probabilities(choice, peak, total)
        if bias is not None:
            choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
        key = _key(choice, inside)
        if GROUPS > 1:
            key = _within_groups(key, GROUPS, TOP_GROUPS, BLOCK_M, BLOCK_G, BLOCK_S)
        keys += (key,)

    # The k largest
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for i in tl.static_range(K):
        best = _first_largest_of(keys, place, CHUNKS)
        chosen = tl.where(offs_k == i, best, chosen)
        rest = ()
        for c in tl.static_range(CHUNKS):
            rest += (tl.where(place + c * place.shape[1] == best, TAKEN, keys[c]),)
        keys = rest
    if GROUPS > 1:
        chosen = chosen // BLOCK_S * SIZE + chosen % BLOCK_S

    # Their weights
    mask = (row < T) & (offs_k < K)
    chosen_x = tl.load(logits + chosen, mask=mask, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        w = _sigmoid(chosen_x)
    else:
        w = _probabilities(chosen_x, peak, total)
    if RENORMALIZE:
        divisor = tl.sum(tl.where(offs_k < K, w, 0.0), 1, keep_dims=True)
        w = tl.div_rn(w, divisor + EPSILON if SIGMOID else divisor)
    if SIGMOID:
        w *= scale
    offs = row.to(tl.int64) * K + offs_k
    tl.store(weights + offs, w, mask=mask)
    tl.store(ids + offs, chosen.to(tl.int64), mask=mask)


@triton.jit
def _backward_kernel(
    dlogits, dweights, logits, ids, T, N, stride, stride_dw, scale,  # dlogits, logits: (T, N)  dweights, ids: (T, K)
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    logits += row.to(tl.int64) * stride
    expert = tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask, mask_k = (row < T) & (expert < N), (row < T) & (offs_k < K)
    x = tl.load(logits + expert, mask=mask, other=float("-inf")).to(tl.float32)  # (BLOCK_M, BLOCK_N)
    chosen = tl.load(ids + row.to(tl.int64) * K + offs_k, mask=mask_k, other=0)
    chosen_x = tl.load(logits + chosen, mask=mask_k, other=float("-inf")).to(tl.float32)
    dw = tl.load(dweights + row.to(tl.int64) * stride_dw + offs_k, mask=mask_k, other=0.0).to(tl.float32)

    # Gradients of the scores of the chosen
    if SIGMOID:
        score, chosen_score = _sigmoid(x), _sigmoid(chosen_x)
        dw *= scale
    else:
        peak = tl.max(x, 1, keep_dims=True)
        total = tl.sum(libdevice.exp(x - peak), 1, keep_dims=True)
        score, chosen_score = _probabilities(x, peak, total), _probabilities(chosen_x, peak, total)
    chosen_score = tl.where(mask_k, chosen_score, 0.0)
    inner = tl.sum(dw * chosen_score, 1, keep_dims=True)
    if RENORMALIZE:
        divisor = tl.sum(chosen_score, 1, keep_dims=True)
        if SIGMOID:
            divisor += EPSILON
        dw = (dw - inner / divisor) / divisor
        inner = tl.sum(dw * chosen_score, 1, keep_dims=True)  # 0 but for the rounding, which it takes out of dx

    # One row of gradients
    dscore = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(K):
        is_this = offs_k == i
        which = tl.sum(tl.where(is_this, chosen, 0), 1, keep_dims=True)
        dscore = tl.where(expert == which, tl.sum(tl.where(is_this, dw, 0.0), 1, keep_dims=True), dscore)
    dx = dscore * score * (1.0 - score) if SIGMOID else score * (dscore - inner)
    tl.store(dlogits + row.to(tl.int64) * N + expert, dx.to(dlogits.dtype.element_ty), mask=mask)


_route = TritonKernel(_route_kernel)
_differentiate = TritonKernel(_backward_kernel)


def why_not(args: TopkSoftmaxArgs | TopkSigmoidArgs) -> str | None:
    return no_float64(*args) or _too_large(args.logits.shape[1], args.k)


def why_not_backward(args: TopkSoftmaxBackwardArgs | TopkSigmoidBackwardArgs) -> str | None:
    return no_float64(*args) or _too_large(args.logits.shape[1], args.ids.shape[1])


def _too_large(experts: int, k: int) -> str | None:
    if experts <= MOST_EXPERTS and k <= MOST_CHOSEN:
        return None
    return f"takes up to {MOST_EXPERTS} experts and k up to {MOST_CHOSEN}"


def route(outs: tuple[Tensor, Tensor], args: TopkSigmoidArgs, sigmoid: bool, config: Config) -> None:
    logits, bias, k, n_group, topk_group, renormalize, scale = args
    logits = as_rows(logits)
    tokens, experts = logits.shape
    size = experts // n_group
    block = triton.next_power_of_2(size)
    if n_group == 1 and experts <= MOST_CHUNKS * CHUNK:
        block = min(block, CHUNK)
    constants: tuple[Any, ...] = (
        sigmoid, bool(renormalize), n_group, topk_group, size, k, config.block_m, triton.next_power_of_2(n_group),
        block, triton.next_power_of_2(k), 1 if n_group > 1 else triton.cdiv(size, block),
    )  # fmt: skip
    _route(
        (triton.cdiv(tokens, config.block_m),),
        (*outs, logits, None if bias is None else bias.contiguous(), tokens, logits.stride(0), scale),
        constants,
        num_warps=config.num_warps,
    )


def differentiate(outs: tuple[Tensor], args: TopkSigmoidBackwardArgs, sigmoid: bool, config: Config) -> None:
    dweights, logits, ids, renormalize, scale = args
    logits, dweights = as_rows(logits), as_rows(dweights)
    tokens, experts = logits.shape
    k = ids.shape[1]
    _differentiate(
        (triton.cdiv(tokens, config.block_m),),
        (outs[0], dweights, logits, ids.contiguous(), tokens, experts, logits.stride(0), dweights.stride(0), scale),
        (
            sigmoid, bool(renormalize), k, config.block_m, triton.next_power_of_2(experts), triton.next_power_of_2(k),
        ),
        num_warps=config.num_warps,
    )  # fmt: skip


@register_kernel(
    topk_softmax.FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=why_not,
)  # fmt: skip
def launch_softmax(outs: tuple[Tensor, Tensor], args: TopkSoftmaxArgs, config: Config) -> None:
    route(outs, TopkSigmoidArgs(args.logits, args.bias, args.k, 1, 1, args.renormalize, 1.0), False, config)


@register_kernel(
    topk_sigmoid.FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=why_not,
)  # fmt: skip
def launch_sigmoid(outs: tuple[Tensor, Tensor], args: TopkSigmoidArgs, config: Config) -> None:
    route(outs, args, True, config)


@register_kernel(
    topk_softmax.BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=why_not_backward,
)  # fmt: skip
def launch_softmax_backward(outs: tuple[Tensor], args: TopkSoftmaxBackwardArgs, config: Config) -> None:
    differentiate(outs, TopkSigmoidBackwardArgs(*args, 1.0), False, config)


@register_kernel(
    topk_sigmoid.BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=why_not_backward,
)  # fmt: skip
def launch_sigmoid_backward(outs: tuple[Tensor], args: TopkSigmoidBackwardArgs, config: Config) -> None:
    differentiate(outs, args, True, config)
